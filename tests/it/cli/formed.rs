//! Answers that must look like something: `--json-schema` and its like, and tools in files of requests.

use serde_json::{Value, json};

use super::{copied, model, object, run, stderr};

const TINY: &str = "tiny/qwen2-tied";

#[test]
fn an_answer_keeps_to_its_schema_or_expression() {
    let schema = r#"{"type": "object", "properties": {"ok": {"type": "boolean"}, "n": {"enum": [1, 2, 3]}},
        "required": ["ok", "n"], "additionalProperties": false}"#;
    let validator = jsonschema::validator_for(&serde_json::from_str(schema).unwrap()).unwrap();
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), schema).unwrap();
    let name = model(TINY);
    for given in [schema, file.path().to_str().unwrap()] {
        let all = ["-m", &name, "--raw", "--temperature", "1", "--seed", "5", "-n", "200", "--json-schema", given, "x"];
        let found = object(&all);
        assert_eq!(found["finish_reason"], "stop", "{found}");
        let text = found["text"].as_str().unwrap();
        assert!(validator.is_valid(&serde_json::from_str(text).unwrap()), "{text}");
    }
    let found = object(&["-m", &name, "--raw", "-n", "20", "--regex", "a{3}b?", "x"]);
    assert!(["aaa", "aaab"].contains(&found["text"].as_str().unwrap()), "{found}");
}

#[test]
fn what_no_answer_can_be_is_refused() {
    let name = model(TINY);
    let check = |options: &[&str], part: &str| {
        let output = run(&[&["-m", &name, "--raw", "x"], options].concat());
        let said = stderr(&output);
        assert_eq!(output.status.code(), Some(2), "{said}");
        assert!(said.contains(part), "{said}");
    };
    check(&["--json-schema", r#"{"type": "strin"}"#], "strin");
    check(&["--json-schema", "{"], "--json-schema is no JSON");
    check(&["--json-schema", "no/such/file"], "no/such/file");
    check(&["--regex", "a("], "the regular expression");
    check(&["--regex", "a", "--json-object"], "cannot be used with");
}

#[test]
fn tools_are_called_in_a_batch() {
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name).to_str().unwrap().to_owned();
    let (requests, answers, template) = (path("requests.jsonl"), path("answers.jsonl"), path("template.jinja"));
    std::fs::write(&template, "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}").unwrap();
    let parameters = json!({"type": "object", "properties": {"city": {"enum": ["Rome", "Bonn"]}}, "required": ["city"],
        "additionalProperties": false});
    let tool = |name: &str| json!({"type": "function", "function": {"name": name, "parameters": parameters}});
    let asked = json!({"role": "assistant", "content": null, "tool_calls": [{"id": "c1", "type": "function",
        "function": {"name": "weather", "arguments": "{\"city\": \"Rome\"}"}}]});
    let messages = json!([{"role": "user", "content": "Rome?"}, asked,
        {"role": "tool", "tool_call_id": "c1", "content": "sunny"}]);
    let tools = [tool("weather"), tool("news")];
    let named = json!({"type": "function", "function": {"name": "news"}});
    let lines = [
        json!({"messages": messages, "tools": tools, "tool_choice": "required", "parallel_tool_calls": false}),
        json!({"prompt": "x", "tools": tools, "tool_choice": named}),
        json!({"prompt": "x", "tools": [tool("a b")]}),
        json!({"prompt": "x", "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "no"}}}}),
    ];
    let lines: String = lines.iter().map(|line| format!("{line}\n")).collect();
    std::fs::write(&requests, lines).unwrap();
    // Tools take many of a toy's tokens, each of a letter or two.
    let (_toy, toy) = copied(TINY);
    let config = std::fs::read_to_string(toy.join("config.json")).unwrap();
    let longer = config.replace("\"max_position_embeddings\": 256", "\"max_position_embeddings\": 4096");
    assert_ne!(longer, config);
    std::fs::write(toy.join("config.json"), longer).unwrap();
    let name = toy.to_str().unwrap();
    let options = ["--chat-template", &template, "--temperature", "1", "-n", "250", "--ctx", "2048"];
    let report = object(&[&["batch", &requests, "-o", &answers, "-m", name][..], &options].concat());
    assert_eq!((report["answers"].as_u64(), report["errors"].as_u64()), (Some(2), Some(2)));
    let text = std::fs::read_to_string(&answers).unwrap();
    let mut found: Vec<Value> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    found.sort_by_key(|answer| answer["line"].as_u64());
    for (answer, names) in found[..2].iter().zip([&["weather", "news"][..], &["news"]]) {
        assert_eq!((&answer["finish_reason"], &answer["text"]), (&json!("tool_calls"), &json!("")), "{answer}");
        let calls = answer["tool_calls"].as_array().unwrap();
        assert_eq!(calls.len(), 1);
        assert!(names.contains(&calls[0]["function"]["name"].as_str().unwrap()), "{answer}");
        let arguments = serde_json::from_str(calls[0]["function"]["arguments"].as_str().unwrap()).unwrap();
        assert!(jsonschema::is_valid(&parameters, &arguments), "{answer}");
    }
    let error = |index: usize| found[index]["error"]["message"].as_str().unwrap().to_owned();
    assert!(error(2).contains("tools[0].function.name"), "{}", error(2));
    assert!(error(3).contains("response_format.json_schema.schema"), "{}", error(3));
}
