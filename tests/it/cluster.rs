//! Stages on other hosts: the real endpoints on loopback, in threads and in processes.

mod cli;
mod faults;
mod identical;
mod killed;
pub mod local;
mod namespaces;
mod paced;
pub mod processes;
mod weights;
