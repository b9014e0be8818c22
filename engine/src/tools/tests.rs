use std::path::Path;
use std::sync::Arc;

use proptest::prelude::*;
use serde_json::{Value, json};

use super::*;
use crate::constraint::{Grammar, Grammars};
use crate::tokenizer::{Encode, Tokenizer};

/// Text, and calls with their arguments.
type Read = (String, Vec<(String, String)>);

fn read(format: ToolFormat, pieces: &[&str]) -> Read {
    let mut parser = ToolParser::new(format);
    let mut text = String::new();
    let mut calls: Vec<(String, String)> = Vec::new();
    let mut all: Vec<Piece> = pieces.iter().flat_map(|piece| parser.push(piece)).collect();
    all.extend(parser.finish());
    for piece in all {
        match piece {
            Piece::Text(more) => text += &more,
            Piece::Call { index, name } => {
                assert_eq!(index, calls.len());
                calls.push((name, String::new()));
            }
            Piece::Arguments { index, text } => {
                assert_eq!(index + 1, calls.len());
                assert!(!text.is_empty());
                calls[index].1 += &text;
            }
        }
    }
    assert_eq!(parser.calls(), calls.len());
    (text, calls)
}

fn expected(text: &str, calls: &[(&str, &str)]) -> Read {
    (text.to_owned(), calls.iter().map(|(name, arguments)| ((*name).to_owned(), (*arguments).to_owned())).collect())
}

/// Answers with what is in them.
fn answers() -> Vec<(ToolFormat, &'static str, Read)> {
    use ToolFormat::{Hermes, Llama, Mistral};
    let case = |format, answer, text: &str, calls: &[(&str, &str)]| (format, answer, expected(text, calls));
    vec![
        case(Hermes, "Just <b>text</b> with < and {", "Just <b>text</b> with < and {", &[]),
        case(
            Hermes,
            "<tool_call>\n{\"name\": \"f\", \"arguments\": {\"a\": 1}}\n</tool_call>",
            "",
            &[("f", "{\"a\": 1}")],
        ),
        case(
            Hermes,
            "Wait.\n<tool_call>\n{\"name\":\"f\",\"arguments\":{\"a\":\"}\\\"{\"}}\n</tool_call>\n<tool_call>\n{ \"name\" : \"g\" , \
             \"arguments\" : {} } </tool_call>\n",
            "Wait.\n",
            &[("f", "{\"a\":\"}\\\"{\"}"), ("g", "{}")],
        ),
        case(
            Hermes,
            "<tool_call>{\"name\": \"f\", \"arguments\": {\"x\": [1, {\"y\": null}]}}</tool_call> So be it.",
            " So be it.",
            &[("f", "{\"x\": [1, {\"y\": null}]}")],
        ),
        case(Hermes, "<tool_call>\nno call\n</tool_call>", "<tool_call>\nno call\n</tool_call>", &[]),
        case(
            Hermes,
            "<tool_call>no <tool_call>{\"name\": \"f\", \"arguments\": {}}</tool_call>",
            "<tool_call>no ",
            &[("f", "{}")],
        ),
        case(Hermes, "<tool_call>\n{\"name\": \"f\", \"argu", "<tool_call>\n{\"name\": \"f\", \"argu", &[]),
        case(Hermes, "<tool_call>\n{\"name\": \"f\", \"arguments\": {\"a\": \"b", "", &[("f", "{\"a\": \"b")]),
        case(Hermes, "a <tool_c", "a <tool_c", &[]),
        case(Hermes, "  \n", "  \n", &[]),
        case(Llama, "{\"name\": \"f\", \"parameters\": {\"é\": \"ü\"}}", "", &[("f", "{\"é\": \"ü\"}")]),
        case(Llama, "\n\n{\"name\": \"f\\u0061\", \"parameters\": {}}", "", &[("fa", "{}")]),
        case(Llama, "{\"answer\": 5} is JSON", "{\"answer\": 5} is JSON", &[]),
        case(Llama, "x {\"name\": \"f\", \"parameters\": {}}", "x {\"name\": \"f\", \"parameters\": {}}", &[]),
        case(
            Mistral,
            "[TOOL_CALLS] [{\"name\": \"f\", \"arguments\": {\"a\": 1}}, {\"name\": \"g\", \"arguments\": {}}]",
            "",
            &[("f", "{\"a\": 1}"), ("g", "{}")],
        ),
        case(Mistral, "Hm. [TOOL_CALLS][{\"name\": \"f\", \"arguments\": {}}]", "Hm. ", &[("f", "{}")]),
        case(Mistral, "[TOOL_CALLS] what?", "[TOOL_CALLS] what?", &[]),
        case(Mistral, "[TOOL", "[TOOL", &[]),
    ]
}

#[test]
fn calls_are_found() {
    for (format, answer, expected) in answers() {
        assert_eq!(read(format, &[answer]), expected, "{answer}");
    }
}

#[test]
fn how_an_answer_is_cut_does_not_matter() {
    for (format, answer, expected) in answers() {
        let letters: Vec<String> = answer.chars().map(String::from).collect();
        let letters: Vec<&str> = letters.iter().map(String::as_str).collect();
        assert_eq!(read(format, &letters), expected, "{answer}");
        for at in answer.char_indices().map(|(at, _)| at) {
            assert_eq!(read(format, &[&answer[..at], &answer[at..]]), expected, "{answer} cut at {at}");
        }
    }
}

#[test]
fn text_comes_as_soon_as_it_is_certain() {
    let mut parser = ToolParser::new(ToolFormat::Hermes);
    assert_eq!(parser.push("Let me <to"), [Piece::Text("Let me ".into())]);
    assert_eq!(parser.push("ast>"), [Piece::Text("<toast>".into())]);
    assert_eq!(parser.push("<tool_call>{\"name\": \"f\", \"arguments\": "), []);
    let name = Piece::Call { index: 0, name: "f".into() };
    assert_eq!(parser.push("{\"a\""), [name, Piece::Arguments { index: 0, text: "{\"a\"".into() }]);
    assert_eq!(parser.push(": 1}"), [Piece::Arguments { index: 0, text: ": 1}".into() }]);
    assert_eq!(parser.push("}</tool_call>"), []);
    assert_eq!(parser.finish(), []);
}

proptest! {
    #[test]
    fn any_text_is_borne(
        pieces in prop::collection::vec("(<tool_call>|</tool_call>|\\[TOOL_CALLS\\]|\\{\"name\": \"f\"|, \"(arguments|parameters)\": |[\\[\\]{},\" é<]|\\{\\}){0,4}", 0..8),
    ) {
        for (format, _) in ToolFormat::ALL {
            let whole = pieces.concat();
            let parts: Vec<&str> = pieces.iter().map(String::as_str).collect();
            prop_assert_eq!(read(format, &parts), read(format, &[&whole]));
        }
    }
}

#[test]
fn formats_are_known_by_their_templates() {
    let check = |source: &str, format| assert_eq!(ToolFormat::of_template(source), format);
    check("{%- if tools %}…<tool_call>\\n{\"name\": <function-name>…", Some(ToolFormat::Hermes));
    check("{{ '[TOOL_CALLS] [' }}", Some(ToolFormat::Mistral));
    check(
        "{{ 'Respond in the format {\"name\": function name, \"parameters\": dictionary}' }}ipython",
        Some(ToolFormat::Llama),
    );
    check("{% for message in messages %}{{ message.content }}{% endfor %}", None);
    for (format, name) in ToolFormat::ALL {
        assert_eq!(format.name(), name);
    }
}

fn tokenizer(name: &str) -> Arc<Tokenizer> {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/data/tokenizers").join(name);
    Arc::new(Tokenizer::from_hf_dir(&dir).unwrap())
}

fn tools() -> Vec<Tool> {
    let weather = json!({"properties": {"city": {"enum": ["Rome", "Bonn"]}, "days": {"$ref": "#/$defs/days"}},
        "required": ["city", "days"], "additionalProperties": false, "$defs": {"days": {"type": "integer", "minimum": 1,
        "maximum": 9}}});
    let clock = json!({"type": "object", "properties": {}, "additionalProperties": false});
    vec![Tool { name: "weather".into(), parameters: weather }, Tool { name: "clock-2_x".into(), parameters: clock }]
}

/// Whether an answer is one under a grammar: begun, and whether it may end there.
fn takes(grammars: &Grammars, tokenizer: &Tokenizer, lark: &str, answer: &str) -> (bool, bool) {
    let constraint = grammars.compile(&Grammar::Made(lark.to_owned())).unwrap_or_else(|e| panic!("{e}\n{lark}"));
    let mut progress = constraint.begin();
    let ids = tokenizer.encode(answer, Encode::default()).unwrap();
    for id in ids {
        if !progress.allowed().contains(id) {
            return (false, false);
        }
        if progress.take(id).unwrap() {
            return (true, true);
        }
    }
    (true, tokenizer.eos_ids().iter().any(|eos| progress.allowed().contains(*eos)))
}

#[test]
fn grammars_take_calls_and_nothing_else() {
    let tokenizer = tokenizer("qwen2");
    let grammars = Grammars::new(tokenizer.clone(), tokenizer.vocab_size()).unwrap();
    let tools = tools();
    let schema =
        json!({"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"], "additionalProperties": false});
    let check =
        |format, required, parallel, otherwise: Option<&Value>, whole: &[&str], begun: &[&str], refused: &[&str]| {
            let allowed = Allowed { tools: &tools, required, parallel, otherwise };
            let lark = grammar(format, &allowed, &|text| tokenizer.id_of(text).filter(|id| tokenizer.is_special(*id)))
                .unwrap();
            let cases = [(whole, (true, true)), (begun, (true, false)), (refused, (false, false))];
            for (answers, expected) in cases {
                for answer in answers {
                    assert_eq!(takes(&grammars, &tokenizer, &lark, answer), expected, "{answer}\n{lark}");
                }
            }
        };
    let hermes = |name: &str, arguments: &str| {
        format!("<tool_call>\n{{\"name\": \"{name}\", \"arguments\": {arguments}}}\n</tool_call>")
    };
    let (rome, clock) = (hermes("weather", "{\"city\": \"Rome\", \"days\": 3}"), hermes("clock-2_x", "{}"));
    let (bad, unknown) = (hermes("weather", "{\"city\": \"Paris\"}"), hermes("other", "{}"));
    let both = format!("{rome}\n{clock}");
    let talk = format!("I look.\n{rome}");
    let hermes_format = ToolFormat::Hermes;
    check(
        hermes_format,
        true,
        true,
        None,
        &[&rome, &clock, &both],
        &["<tool_call>\n{\"name\": \"we"],
        &[&talk, &bad, &unknown, "Hi"],
    );
    check(hermes_format, true, false, None, &[&rome], &[], &["Hi", &bad]);
    check(
        hermes_format,
        false,
        true,
        None,
        &["Hi", "", &rome, &talk, &both, "a < b <tool"],
        &["<tool_call>", "Hm <tool_call>\n{\"name\": \"clock"],
        &[&bad, &unknown, "<tool_call>x"],
    );
    check(hermes_format, false, true, Some(&schema), &["{\"a\": 1}", "{\"a\":1}", &both], &["{\"a\""], &["Hi", &bad]);
    let llama = |name: &str, arguments: &str| format!("{{\"name\": \"{name}\", \"parameters\": {arguments}}}");
    let (rome, bad) = (llama("weather", "{\"city\": \"Rome\", \"days\": 3}"), llama("weather", "{\"days\": 30}"));
    check(ToolFormat::Llama, true, true, None, &[&rome], &[], &["Hi", &bad]);
    check(ToolFormat::Llama, false, true, None, &[&rome, "Hi {", ""], &["{\"name\""], &[&bad, "{\"a\": 1}"]);
    let mistral = |calls: &[&str]| format!("[TOOL_CALLS] [{}]", calls.join(", "));
    let call = |name: &str, arguments: &str| format!("{{\"name\": \"{name}\", \"arguments\": {arguments}}}");
    let (rome, clock) = (call("weather", "{\"city\": \"Bonn\", \"days\": 9}"), call("clock-2_x", "{}"));
    let (one, two) = (mistral(&[&rome]), mistral(&[&rome, &clock]));
    let bad = mistral(&[&call("weather", "{}")]);
    check(ToolFormat::Mistral, true, true, None, &[&one, &two], &["[TOOL_CALLS]"], &["Hi", &bad]);
    check(ToolFormat::Mistral, true, false, None, &[&one], &["[TOOL_CALLS]"], &["Hi", &bad, &two]);
    check(ToolFormat::Mistral, false, true, None, &[&one, &two, "Hi", "a [b]"], &["Hm.[TOOL_CALLS] ["], &[&bad]);
}

#[test]
fn a_marker_may_be_one_special_token() {
    let tokenizer = tokenizer("qwen2");
    let grammars = Grammars::new(tokenizer.clone(), tokenizer.vocab_size()).unwrap();
    let special = (0..tokenizer.vocab_size() as u32)
        .find(|id| tokenizer.is_special(*id) && !tokenizer.eos_ids().contains(id))
        .expect("special tokens");
    let tools = tools();
    for (format, marker) in [(ToolFormat::Hermes, "<tool_call>"), (ToolFormat::Mistral, "[TOOL_CALLS]")] {
        for required in [true, false] {
            let allowed = Allowed { tools: &tools, required, parallel: true, otherwise: None };
            let lark = grammar(format, &allowed, &|text| (text == marker).then_some(special)).unwrap();
            let constraint = grammars.compile(&Grammar::Made(lark)).unwrap();
            let mut progress = constraint.begin();
            assert_eq!(progress.allowed().only(), required.then_some(special));
            assert!(progress.allowed().contains(special));
            assert!(!progress.take(special).unwrap());
            let next = if format == ToolFormat::Hermes { "\n" } else { " [" };
            let id = tokenizer.encode(next, Encode::default()).unwrap()[0];
            assert!(progress.allowed().contains(id), "{marker} {required}");
        }
    }
}

#[test]
fn parameters_are_those_of_an_object() {
    for parameters in [json!({"type": "string"}), json!([]), json!(null)] {
        let tools = [Tool { name: "f".into(), parameters }];
        let allowed = Allowed { tools: &tools, required: true, parallel: true, otherwise: None };
        let error = grammar(ToolFormat::Hermes, &allowed, &|_| None).unwrap_err().to_string();
        assert!(error.contains("\"f\""), "{error}");
    }
}
