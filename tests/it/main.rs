//! Tests of the whole: kernels against their twins, models against recorded logits, the program as a user runs it.

mod cli;
mod kernels;
mod models;
mod smollm2;
mod support;
