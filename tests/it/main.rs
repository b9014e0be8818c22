//! Tests of the whole: kernels against their twins, models against recorded logits, the program as a user runs it.

mod batching;
mod cancel;
mod chat;
mod cli;
mod cluster;
mod constrained;
mod crowd;
mod disk;
mod house;
mod journal;
mod kernels;
mod models;
mod overlap;
mod paced;
mod planned;
mod programs;
mod recovery;
mod resumed;
mod sampling;
mod serve;
mod service;
mod simulated;
mod smollm2;
mod support;
mod terminal;
