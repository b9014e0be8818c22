use clap::Parser;

use super::*;
use crate::args::Cli;

fn parse(line: &[&str]) -> Cli {
    Cli::try_parse_from([&["pp-run"], line].concat()).unwrap_or_else(|e| panic!("{line:?}: {e}"))
}

#[track_caller]
fn refused<T: std::fmt::Debug>(result: Result<T>, wanted: &str) {
    let error = result.unwrap_err();
    assert_eq!(crate::errors::exit_of(&error), crate::errors::Exit::Usage);
    let message = error.to_string();
    assert!(message.contains(wanted), "{message:?} lacks {wanted:?}");
}

#[test]
fn one_prompt_is_taken_and_two_are_refused() {
    let source = |line: &[&str], terminal| prompt_source(&parse(line).run.prompt, terminal);
    assert_eq!(source(&["hi"], true).unwrap(), PromptSource::Typed("hi".into()));
    assert_eq!(source(&["--prompt", "-x"], true).unwrap(), PromptSource::Typed("-x".into()));
    assert_eq!(source(&["--", "devices"], true).unwrap(), PromptSource::Typed("devices".into()));
    assert_eq!(source(&["--prompt-file", "f"], false).unwrap(), PromptSource::File("f".into()));
    assert_eq!(source(&[], false).unwrap(), PromptSource::Stdin);
    refused(source(&[], true), "no prompt");
    refused(source(&["hi", "--prompt", "ho"], true), "an argument and --prompt");
    refused(source(&["--prompt", "ho", "-f", "f"], true), "--prompt and --prompt-file");
}

#[test]
fn texts_are_verbatim_and_utf8() {
    assert_eq!(text(b" a\r\n\n".to_vec(), "stdin").unwrap(), " a\r\n\n");
    refused(text(b"ab\xffc".to_vec(), "stdin"), "stdin is not valid UTF-8: byte 2 (counted from 0) is 0xff");
    refused(text("é".as_bytes()[..1].to_vec(), "f.txt"), "byte 0");
    refused(not_empty("", "stdin"), "is empty");
    assert!(not_empty(" ", "stdin").is_ok());
}

#[test]
fn template_arguments_are_json_or_text() {
    let typed = ["a=true", "b=1", "c=plain", "d=\"q\"", "e=x=y", "f="].map(str::to_owned);
    let found = serde_json::to_string(&template_args(&typed).unwrap()).unwrap();
    assert_eq!(found, r#"{"a":true,"b":1,"c":"plain","d":"q","e":"x=y","f":""}"#);
    refused(template_args(&["a".into()]), "KEY=VALUE");
    refused(template_args(&["=a".into()]), "KEY=VALUE");
}

#[test]
fn precision_follows_weights_and_the_exact_mode() {
    use ActivationsArg as A;
    use KvArg as K;
    let check = |a, k, quantised, act, kv| assert_eq!(precision(a, k, quantised).unwrap(), (act, kv), "{a:?} {k:?}");
    check(A::Auto, K::Auto, true, Act::Q8, KvType::F16);
    check(A::Auto, K::Auto, false, Act::F32, KvType::F16);
    check(A::Auto, K::F32, true, Act::Q8, KvType::F32);
    check(A::Q8, K::Auto, false, Act::Q8, KvType::F16);
    check(A::F32, K::Auto, true, Act::F32, KvType::F32);
    check(A::F32, K::F32, true, Act::F32, KvType::F32);
    refused(precision(A::F32, K::F16, true), "exact mode");
}

fn sampled(line: &[&str], declared: &GenerationDefaults) -> Result<Sampling> {
    sampling(&parse(&[&["hi"], line].concat()).run.sampling, declared, 7, 0)
}

#[test]
fn sampling_is_as_typed_else_as_declared_else_greedy() {
    let nothing = GenerationDefaults::default();
    assert_eq!(sampled(&[], &nothing).unwrap(), Sampling { seed: 7, ..Sampling::default() });
    let declared = GenerationDefaults {
        temperature: Some(0.7),
        top_k: Some(20),
        top_p: Some(0.8),
        repetition_penalty: Some(1.1),
        do_sample: Some(true),
        ..nothing.clone()
    };
    let found = sampled(&[], &declared).unwrap();
    assert_eq!((found.temperature, found.top_k, found.top_p), (0.7, 20, 0.8));
    assert_eq!(found.repetition_penalty, 1.0, "only when typed");
    let typed = sampled(&["-t", "0.5", "--top-k", "3", "--repeat-penalty", "1.2", "--seed", "9"], &declared).unwrap();
    assert_eq!((typed.temperature, typed.top_k, typed.repetition_penalty, typed.seed), (0.5, 3, 1.2, 9));
    let greedy = GenerationDefaults { do_sample: Some(false), ..declared };
    assert_eq!(sampled(&[], &greedy).unwrap().temperature, 0.0);
    let samples = GenerationDefaults { do_sample: Some(true), ..nothing };
    assert_eq!(sampled(&[], &samples).unwrap().temperature, 1.0, "as transformers has it");
}

#[test]
fn sampling_out_of_range_is_refused() {
    for (line, wanted) in [
        (&["-t", "-1"][..], "--temperature -1: expected 0 to 100"),
        (&["-t", "nan"], "--temperature NaN"),
        (&["-t", "inf"], "--temperature inf"),
        (&["--top-p", "0"], "--top-p 0: expected 0.000001 to 1"),
        (&["--top-p", "1.1"], "--top-p 1.1"),
        (&["--min-p", "-0.1"], "--min-p -0.1: expected 0 to 1"),
        (&["--repeat-penalty", "0"], "--repeat-penalty 0"),
        (&["--presence-penalty", "nan"], "--presence-penalty"),
        (&["--frequency-penalty", "inf"], "--frequency-penalty"),
        (&["-n", "0"], "--max-tokens 0"),
        (&["--stop", ""], "--stop"),
    ] {
        refused(sampled(line, &GenerationDefaults::default()), wanted);
    }
}

#[test]
fn layers_are_counted_as_typed() {
    let costs = Costs { layers: vec![10; 30], first: 100, last: 100 };
    let counts = |line: &[&str]| {
        let pipeline = parse(&[&["hi"], line].concat()).run.pipeline;
        Ok(split(&pipeline)?.resolve(pipeline.stages, &costs)?) as Result<Vec<usize>>
    };
    assert_eq!(counts(&[]).unwrap(), [30]);
    assert_eq!(counts(&["--split", "8,8,7,7"]).unwrap(), [8, 8, 7, 7]);
    assert_eq!(counts(&["--split", "1:2"]).unwrap(), [10, 20]);
    assert_eq!(counts(&["--stages", "3"]).unwrap(), [7, 17, 6]);
    refused(counts(&["--split", "9,8,8,8"]), "9+8+8+8 = 33 ≠ 30");
    refused(counts(&["--split", "-1,31"]), "at least one layer");
    refused(counts(&["--split", "x"]), "expected layer counts");
    refused(counts(&["--stages", "3", "--split", "15,15"]), "disagree");
    refused(counts(&["--stages", "31"]), "at most 30 stages");
}

#[test]
fn numbers_out_of_range_are_refused() {
    assert_eq!(chunk(None, 128).unwrap(), 128);
    assert_eq!(chunk(Some(7), 128).unwrap(), 7);
    refused(chunk(Some(0), 128), "--max-batch-tokens 0");
    refused(chunk(Some(1 << 20), 128), "--max-batch-tokens");
    assert_eq!(context(None, 256).unwrap(), None);
    assert_eq!(context(Some(256), 256).unwrap(), Some(256));
    refused(context(Some(257), 256), "at most 256");
    refused(context(Some(0), 256), "--ctx 0");
    assert_eq!(logprobs(Some(5), true).unwrap(), 5);
    refused(logprobs(Some(65), true), "0 to 64");
    refused(logprobs(Some(1), false), "--json");
}
