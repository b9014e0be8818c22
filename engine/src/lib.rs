//! What a stage of a pipeline computes, and the policies around it.
//!
//! The engine is synchronous: a stage is one thread that owns its device. It does not know the command line; frames cross
//! stages through `pp_transport::Port`, in this process or to workers on other hosts ([`cluster`]).
//!
//! The data path, one file a step: [`checkpoint`] and [`config`] → [`split`] → [`layout`] → [`weights`] (+ [`quant`]) →
//! [`arch`] → [`program`] → [`stage`] on a [`backend`] → port → next stage … → tail → port → [`head`], which samples.

pub mod arch;
pub mod backend;
pub mod boundary;
pub mod calibrate;
pub mod chat_template;
pub mod checkpoint;
pub mod cluster;
pub mod config;
pub mod constraint;
pub mod contract;
pub mod digest;
pub mod edge;
#[cfg(any(test, fuzzing))]
pub mod fuzzing;
pub mod head;
pub mod journal;
pub mod json_file;
pub mod law;
pub mod layout;
pub mod manifest;
pub mod message;
pub mod pipeline;
pub mod planner;
pub mod program;
pub mod quant;
pub mod random;
pub mod sampler;
pub mod schedule;
pub mod sim;
pub mod split;
pub mod stage;
pub mod tensor_cache;
pub mod token_set;
pub mod tokenizer;
pub mod tools;
pub mod trace;
pub mod weights;
pub mod wire;
pub mod worker;

pub use pp_shaders::{Act, KvType, PAGE, Profile};
pub use wire::Wire;
