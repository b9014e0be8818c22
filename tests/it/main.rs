//! Tests of the whole: kernels against their twins, models against recorded logits, the program as a user runs it.

mod cancel;
mod cli;
mod house;
mod kernels;
mod models;
mod programs;
mod smollm2;
mod support;
