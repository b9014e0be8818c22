//! Stages on other hosts: the real endpoints on loopback, in threads and in processes.

mod calibrated;
mod chat;
mod cli;
mod doctor;
mod faults;
mod identical;
mod killed;
pub mod local;
mod namespaces;
mod net_bench;
mod paced;
pub mod processes;
mod pull;
mod recovered;
mod stragglers;
mod weights;
