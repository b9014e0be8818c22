#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| pp_engine::fuzzing::weights(bytes));
