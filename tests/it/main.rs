//! Tests of the whole: kernels against their twins, models against recorded logits, the program as a user runs it.

mod kernels;
mod models;
mod support;
