use std::path::Path;
use std::time::{Duration, Instant};

use super::*;
use crate::random::mix;

fn tokenizer(name: &str) -> Arc<Tokenizer> {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/data/tokenizers").join(name);
    Arc::new(Tokenizer::from_hf_dir(&dir).unwrap())
}

fn grammars(tokenizer: &Arc<Tokenizer>) -> Grammars {
    Grammars::new(tokenizer.clone(), tokenizer.vocab_size()).unwrap()
}

/// An answer of a model that knows nothing, and after a while takes what closes things.
fn answer(tokenizer: &Tokenizer, constraint: &Constraint, seed: u64) -> (Vec<u32>, String) {
    let mut progress = constraint.begin();
    let mut ids = Vec::new();
    for step in 0..2000u64 {
        let allowed: Vec<u32> = progress.allowed().iter().collect();
        let closes = |id: &&u32| {
            let bytes = tokenizer.token_bytes(**id);
            tokenizer.eos_ids().contains(id) || bytes.first().is_some_and(|byte| b"\"]}".contains(byte))
        };
        let closing: Vec<u32> = allowed.iter().filter(closes).copied().collect();
        let from = if step > 40 && !closing.is_empty() { closing } else { allowed };
        let id = from[(mix(seed ^ mix(step)) % from.len() as u64) as usize];
        if tokenizer.eos_ids().contains(&id) {
            return (ids.clone(), tokenizer.decode(&ids, false));
        }
        ids.push(id);
        if progress.take(id).unwrap() {
            return (ids.clone(), tokenizer.decode(&ids, false));
        }
    }
    panic!("no end after {}", tokenizer.decode(&ids, false));
}

/// Schemas of every kind that people use.
fn schemas() -> Vec<Value> {
    let address = json!({"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]});
    vec![
        json!({"type": "object"}),
        json!({"enum": ["red", "green", 3, null]}),
        json!({"type": "object", "properties": {"n": {"type": "integer", "minimum": 3, "maximum": 17}},
            "required": ["n"], "additionalProperties": false}),
        json!({"type": "object", "properties": {"x": {"type": "number"}, "ok": {"type": "boolean"}},
            "required": ["x", "ok"], "additionalProperties": false}),
        json!({"type": "array", "items": {"type": "string", "maxLength": 8}, "minItems": 2, "maxItems": 4}),
        json!({"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3}$"}),
        json!({"type": "object", "properties": {"home": address, "work": address}, "required": ["home"],
            "additionalProperties": false}),
        json!({"type": "object", "properties": {"tree": {"$ref": "#/$defs/node"}}, "required": ["tree"],
            "additionalProperties": false,
            "$defs": {"node": {"type": "object", "properties": {"v": {"type": "integer"},
                "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}}, "required": ["v", "next"],
                "additionalProperties": false}}}),
        json!({"anyOf": [{"type": "integer"}, {"type": "object", "properties": {"a": {"const": 1}},
            "required": ["a"], "additionalProperties": false}]}),
        json!({"type": "object", "properties": {"when": {"type": "string", "format": "date"}},
            "required": ["when"], "additionalProperties": false}),
        json!({"type": ["string", "null"], "minLength": 2, "maxLength": 5}),
        json!({"type": "object", "additionalProperties": {"type": "integer"}, "properties": {}}),
    ]
}

#[test]
fn answers_validate_against_their_schema() {
    for name in ["qwen2", "llama3", "smollm", "llama2"] {
        let tokenizer = tokenizer(name);
        let grammars = grammars(&tokenizer);
        for schema in schemas() {
            let constraint = grammars.compile(&Grammar::JsonSchema(schema.clone())).unwrap();
            let validator = jsonschema::options().should_validate_formats(true).build(&schema).unwrap();
            for seed in 0..24 {
                let (_, text) = answer(&tokenizer, &constraint, seed);
                let value: Value = match serde_json::from_str(&text) {
                    Ok(value) => value,
                    // A number may have any exponent.
                    Err(error) if error.to_string().starts_with("number out of range") => continue,
                    Err(error) => panic!("{name}: {schema}: {error}: {text}"),
                };
                assert!(validator.is_valid(&value), "{name}: {schema}: {text}");
            }
        }
    }
}

#[test]
fn other_grammars_hold_too() {
    let tokenizer = tokenizer("qwen2");
    let grammars = grammars(&tokenizer);
    let object = grammars.compile(&Grammar::JsonObject).unwrap();
    let regex = grammars.compile(&Grammar::Regex("(yes|no)( [0-9]{1,2})?".into())).unwrap();
    let lark = grammars.compile(&Grammar::Lark("start: item (\", \" item)*\nitem: /[a-c]{1,3}/".into())).unwrap();
    for seed in 0..50 {
        let (_, text) = answer(&tokenizer, &object, seed);
        assert!(serde_json::from_str::<Value>(&text).unwrap().is_object(), "{text}");
        let (_, text) = answer(&tokenizer, &regex, seed);
        let rest = text.strip_prefix("yes").or(text.strip_prefix("no")).unwrap();
        assert!(rest.is_empty() || rest.strip_prefix(' ').unwrap().parse::<u8>().unwrap() < 100, "{text}");
        let (_, text) = answer(&tokenizer, &lark, seed);
        let is_item = |item: &str| (1..=3).contains(&item.len()) && item.chars().all(|c| ('a'..='c').contains(&c));
        assert!(text.split(", ").all(is_item), "{text}");
    }
}

#[test]
fn states_are_functions_of_the_tokens() {
    let tokenizer = tokenizer("llama3");
    let constraint = grammars(&tokenizer).compile(&Grammar::JsonSchema(schemas()[6].clone())).unwrap();
    let (ids, _) = answer(&tokenizer, &constraint, 5);
    let masks = |constraint: &Constraint| {
        let mut progress = constraint.begin();
        let mut masks = vec![progress.allowed().clone()];
        for id in &ids {
            assert!(progress.allowed().contains(*id));
            if !progress.take(*id).unwrap() {
                masks.push(progress.allowed().clone());
            }
        }
        masks
    };
    let first = masks(&constraint);
    // Another answer in between leaves nothing behind in what they share.
    answer(&tokenizer, &constraint, 6);
    assert_eq!(masks(&constraint.clone()), first);
    let again = grammars(&tokenizer).compile(&Grammar::JsonSchema(schemas()[6].clone())).unwrap();
    assert_eq!(masks(&again), first);
}

#[track_caller]
fn refused(grammar: Grammar) -> String {
    let tokenizer = tokenizer("smollm");
    let started = Instant::now();
    let compiled = grammars(&tokenizer).compile(&grammar);
    let error = compiled.expect_err(&format!("{grammar:.300?} after {:?}", started.elapsed())).to_string();
    assert!(!error.contains('\n') && !error.contains("state>") && !error.contains("panicked"), "{error}");
    assert!(started.elapsed() < Duration::from_secs(60), "{error}");
    error
}

#[test]
fn what_is_wrong_with_a_grammar_is_said() {
    let check = |grammar: Grammar, parts: &[&str]| {
        let error = refused(grammar);
        assert!(parts.iter().all(|part| error.contains(part)), "{error}");
    };
    let schema = |value: Value| Grammar::JsonSchema(value);
    check(schema(json!({"type": "strin"})), &["the JSON schema", "strin"]);
    check(schema(json!({"properties": {"a": {"$ref": "#/$defs/none"}}})), &["none"]);
    check(schema(json!({"$ref": "http://example.com/schema.json"})), &["example.com"]);
    check(schema(json!({"type": "string", "pattern": "(a"})), &["(a"]);
    check(schema(json!({"type": "object", "if": {}, "then": {}})), &["if"]);
    check(schema(json!([1])), &["an array"]);
    check(schema(json!(false)), &["false"]);
    check(schema(json!({"type": "integer", "minimum": 3, "maximum": 2})), &["minimum"]);
    check(Grammar::Regex("a(".into()), &["the regular expression"]);
    check(Grammar::Lark("start: foo".into()), &["the grammar", "foo"]);
    check(Grammar::Lark(String::new()), &["the grammar"]);
}

#[test]
fn what_strangers_ask_for_is_bounded() {
    let check = |grammar: Grammar, part: &str| {
        let error = refused(grammar);
        assert!(error.contains(part), "{error}");
    };
    check(Grammar::JsonSchema(json!({"description": "x".repeat(SCHEMA_BYTES_MAX)})), "bytes; at most");
    check(Grammar::JsonSchema(json!({"allOf": [{"multipleOf": 9973}, {"multipleOf": 9967}]})), "multipleOf");
    check(Grammar::Regex("(".repeat(100_000)), "levels of nesting");
    check(Grammar::Regex("a?".repeat(TEXT_BYTES_MAX)), "bytes; at most");
    check(Grammar::Lark(format!("start: {}\"a\"{}", "(".repeat(5000), ")".repeat(5000))), "levels of nesting");
    check(Grammar::Lark(format!("start: T\nT: /a/{}", " & /(.*)b(.*)/".repeat(20))), "21 patterns that are combined");
    check(Grammar::Lark("start: %json {}".into()), "%json");
}

/// The largest of each kind that is taken is compiled soon, on whatever stack its caller has.
#[test]
fn what_is_within_the_bounds_is_compiled() {
    let tokenizer = tokenizer("smollm");
    let grammars = grammars(&tokenizer);
    let map = |n: usize, value: Value| (0..n).map(|i| (format!("p{i}"), value.clone())).collect::<Value>();
    let chain =
        |i: usize| (format!("d{i}"), if i < 999 { json!({"$ref": format!("#/$defs/d{}", i + 1)}) } else { json!({}) });
    let anchored = |i: usize| (format!("p{i}"), json!({"type": "string", "pattern": format!("^[a-z]*{i}")}));
    let patterns = |i: usize| json!({"type": "string", "pattern": format!("^x{{{i}}}.*y$")});
    for schema in [
        json!({"properties": map(1000, json!({"type": "string"}))}),
        json!({"properties": map(8, json!({"properties": map(900, json!({}))}))}),
        json!({"required": (0..1000).map(|i| format!("p{i}")).collect::<Vec<_>>()}),
        json!({"enum": (0..8000).map(|i| format!("p{i}")).collect::<Vec<_>>()}),
        json!({"anyOf": (0..1000).map(|i| json!({"properties": {format!("p{i}"): {}}, "required": [format!("p{i}")]})).collect::<Vec<_>>()}),
        json!({"$ref": "#/$defs/d0", "$defs": (0..1000).map(chain).collect::<Value>()}),
        json!({"properties": (0..200).map(anchored).collect::<Value>()}),
        json!({"allOf": (0..8).map(patterns).collect::<Vec<_>>()}),
        json!({"type": "integer", "multipleOf": 9973}),
    ] {
        let constraint = grammars.compile(&Grammar::JsonSchema(schema.clone()));
        let constraint = constraint.unwrap_or_else(|error| panic!("{error}: {:.200}", schema.to_string()));
        let mut progress = constraint.begin();
        let id = progress.allowed().iter().next().unwrap();
        progress.take(id).unwrap_or_else(|error| panic!("{error}: {:.200}", schema.to_string()));
    }
}

/// Large in states, not in bytes: an error or an answer, and never an endless search.
#[test]
fn what_is_small_and_means_much_comes_to_an_end() {
    let tokenizer = tokenizer("smollm");
    let grammars = grammars(&tokenizer);
    let many = json!({"type": "array", "items": {"type": "object"}, "minItems": 100_000_000});
    let pattern = json!({"type": "string", "pattern": "^([a-z]{500}x?){900}$"});
    let search = |i: usize| json!({"type": "string", "pattern": format!("a{i}")});
    let ambiguous = "start: a\na: a a | b\nb: \"x\" | \"xx\" | a b | b a".to_owned();
    for grammar in [
        Grammar::Regex("((a|b)*a(a|b){1000}){1000}".into()),
        Grammar::Regex("(.{1,100}){1,100}(.*a.{200})+".into()),
        Grammar::Regex("a*b*".repeat(1000)),
        Grammar::JsonSchema(many),
        Grammar::JsonSchema(pattern),
        Grammar::JsonSchema(json!({"allOf": (0..8).map(search).collect::<Vec<_>>()})),
        Grammar::Lark(ambiguous),
        Grammar::Lark(format!("start: {}\nx: \"a\"", "x? ".repeat(1300))),
    ] {
        let Ok(constraint) = grammars.compile(&grammar) else { continue };
        let mut progress = constraint.begin();
        for step in 0..100 {
            let id = progress.allowed().iter().nth(step % progress.allowed().len()).unwrap();
            match progress.take(id) {
                Ok(false) => {}
                Ok(true) => break,
                Err(error) => {
                    assert!(
                        matches!(error, ConstraintError::TooComplex { tokens, .. } if tokens == step + 1),
                        "{error}"
                    );
                    break;
                }
            }
        }
    }
}

#[test]
fn special_tokens_come_only_where_a_grammar_names_them() {
    let tokenizer = tokenizer("qwen2");
    let grammars = grammars(&tokenizer);
    let free = grammars.compile(&Grammar::Lark("start: /(.|\\n)*/".into())).unwrap();
    let allowed = free.begin();
    let special: Vec<u32> = (0..tokenizer.vocab_size() as u32).filter(|id| tokenizer.is_special(*id)).collect();
    assert!(special.len() >= tokenizer.eos_ids().len() && !tokenizer.eos_ids().is_empty());
    for id in &special {
        assert_eq!(allowed.allowed().contains(*id), tokenizer.eos_ids().contains(id), "{id}");
    }
    let other = *special.iter().find(|id| !tokenizer.eos_ids().contains(id)).unwrap();
    let named = grammars.compile(&Grammar::Lark(format!("start: <[{other}]> \"a\""))).unwrap();
    assert_eq!(named.begin().allowed().only(), Some(other));
    let mut progress = named.begin();
    assert!(!progress.take(other).unwrap());
    assert!(progress.allowed().iter().all(|id| tokenizer.token_bytes(id) == b"a"));
}

#[test]
fn it_may_be_used_from_several_threads() {
    fn check<T: Send + Sync>() {}
    check::<Grammars>();
    check::<Constraint>();
    fn moves<T: Send>() {}
    moves::<Progress>();
}
