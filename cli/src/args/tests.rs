use clap::{CommandFactory, Parser};

use super::*;

fn parse(line: &[&str]) -> Result<Cli, clap::Error> {
    Cli::try_parse_from([&["pp-run"], line].concat())
}

#[test]
fn the_definition_is_sound() {
    Cli::command().debug_assert();
}

#[test]
fn a_bare_verb_is_the_verb_and_can_be_escaped() {
    assert!(matches!(parse(&["devices"]).unwrap().verb, Some(Verb::Devices(_))));
    assert!(parse(&["--", "devices"]).unwrap().verb.is_none());
    assert!(parse(&["--prompt", "devices"]).unwrap().verb.is_none());
    assert_eq!(parse(&["tell me"]).unwrap().run.prompt.words.as_deref(), Some("tell me"));
}

#[test]
fn verbs_take_the_options_that_make_sense() {
    for line in [
        &["plan", "-m", "x", "--stages", "2", "--split", "1,1", "--ctx", "64", "--device", "0,1", "--json"][..],
        &["perplexity", "-m", "x", "--text-file", "f", "--tokens", "8", "--activations", "f32", "--json"],
        &["bench", "-m", "x", "--prompt-tokens", "8", "--gen-tokens", "4", "--depths", "0,512", "--reps", "2"],
        &["inspect", "x", "--json"],
        &["devices", "--json", "--no-selftest"],
        &["doctor", "--cluster", "--no-selftest", "--no-bandwidth", "--listen", "127.0.0.1", "--json"],
        &["net-bench", "--networks", "veth,relay", "--sizes", "64,8K", "--delays", "0,10", "--losses", "0.1", "--json"],
        &["net-bench", "--worker", "rig2"],
        &["trace", "run.json", "--svg", "run.svg", "--from", "0.5", "--to", "1", "--json"],
    ] {
        assert!(parse(line).unwrap().verb.is_some(), "{line:?}");
    }
    assert!(parse(&["perplexity", "-m", "x"]).is_err(), "the text is needed");
    let depths = match parse(&["bench", "--depths", "0,512,2048"]).unwrap().verb {
        Some(Verb::Bench(args)) => args.depths,
        _ => Vec::new(),
    };
    assert_eq!(depths, [0, 512, 2048]);
}

#[test]
fn stages_are_a_positive_number() {
    for text in ["0", "-1", "x", "1.5"] {
        let message = parse(&["hi", "--stages", text]).unwrap_err().to_string();
        assert!(message.contains("--stages"), "{message}");
    }
}

#[test]
fn the_help_of_every_verb_explains_every_option() {
    let mut command = Cli::command();
    command.build();
    for part in std::iter::once(&command).chain(command.get_subcommands().filter(|c| c.get_name() != "help")) {
        for argument in part.get_arguments().filter(|a| a.get_id() != "help" && a.get_id() != "version") {
            assert!(argument.get_help().is_some(), "{} {}", part.get_name(), argument.get_id());
        }
    }
    let help = Cli::command().render_long_help().to_string();
    for wanted in ["Examples:", "Exit codes:", "130", "PP_MODELS", "--repeat-penalty", "--split <SPLIT>", "perplexity"]
    {
        assert!(help.contains(wanted), "{wanted} in\n{help}");
    }
    assert!(!Cli::command().render_help().to_string().contains("reference"), "the short help is for everyday use");
}
