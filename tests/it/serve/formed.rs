//! Answers of a form and calls of tools, over real sockets. Toys say what their random weights say: only the form makes
//! sense of it.

use std::collections::BTreeSet;
use std::path::PathBuf;

use serde_json::{Map, Value, json};

use super::client::{Response, Server};
use crate::cli::{copied, model};

const TINY: &str = "tiny/qwen2-tied";
/// Shows tools, calls and results to the model.
const TEMPLATE: &str = r#"{%- if tools %}<|im_start|>system
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}Call as <tool_call>…</tool_call>.<|im_end|>
{% endif %}
{%- for m in messages %}<|im_start|>{{ m.role }} {{ m.name }}
{{ m.content }}
{%- for call in m.tool_calls %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}<|im_end|>
{% endfor %}<|im_start|>assistant
"#;

/// A toy with a context that tools fit, each of whose letters is a token or two.
struct Toy {
    folder: tempfile::TempDir,
    path: PathBuf,
}

impl Toy {
    fn new() -> Toy {
        let (folder, path) = copied(TINY);
        let toy = Toy { folder, path };
        toy.change("config.json", "\"max_position_embeddings\": 256", "\"max_position_embeddings\": 4096");
        toy
    }

    /// With marks of calls that are one special token each, as some models have them.
    fn with_special_marks() -> Toy {
        let toy = Toy::new();
        let added = |id: u32, content: &str| {
            json!({"id": id, "content": content, "single_word": false, "lstrip": false, "rstrip": false,
                "normalized": false, "special": true})
        };
        let marks = format!("\"added_tokens\":[{},{},", added(384, "<tool_call>"), added(385, "</tool_call>"));
        toy.change("tokenizer.json", "\"added_tokens\":[", &marks);
        toy
    }

    fn change(&self, file: &str, from: &str, to: &str) {
        let path = self.path.join(file);
        let before = std::fs::read_to_string(&path).unwrap();
        let after = before.replacen(from, to, 1);
        assert_ne!(after, before, "{from:?} is in {file}");
        std::fs::write(path, after).unwrap();
    }

    fn serve(&self, template: &str, options: &[&str]) -> Server {
        let file = self.folder.path().join("template.jinja");
        std::fs::write(&file, template).unwrap();
        let own = ["-m", self.path.to_str().unwrap(), "--ctx", "2048", "--chat-template", file.to_str().unwrap()];
        Server::start(&[&own[..], options].concat())
    }
}

fn asked(fields: Value) -> Value {
    let mut body = json!({"messages": [{"role": "user", "content": "Say."}], "temperature": 1, "max_tokens": 200});
    body.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
    body
}

fn format_of(schema: &Value) -> Value {
    json!({"type": "json_schema", "json_schema": {"name": "answer", "strict": true, "schema": schema}})
}

fn streamed(body: &Value) -> Value {
    let mut body = body.clone();
    body["stream"] = true.into();
    body
}

/// The choices of a stream, put together as official clients do.
#[track_caller]
fn together(response: &Response) -> Vec<Value> {
    let (chunks, last) = response.events();
    assert_eq!(last, "[DONE]");
    let mut choices: Vec<Map<String, Value>> = Vec::new();
    for choice in chunks.iter().flat_map(|chunk| chunk["choices"].as_array().unwrap()) {
        let index = choice["index"].as_u64().unwrap() as usize;
        choices.resize(choices.len().max(index + 1), Map::new());
        let found = &mut choices[index];
        assert!(!found.contains_key("finish_reason"), "nothing comes behind the end");
        let delta = choice["delta"].as_object().unwrap();
        if let Some(text) = delta.get("content").and_then(Value::as_str) {
            append(found.entry("content").or_insert("".into()), text);
        }
        for call in delta.get("tool_calls").and_then(Value::as_array).into_iter().flatten() {
            call_together(found.entry("tool_calls").or_insert(json!([])), call);
        }
        let tokens = choice["logprobs"]["content"].as_array().cloned().unwrap_or_default();
        found.entry("logprobs").or_insert(json!([])).as_array_mut().unwrap().extend(tokens);
        if choice["finish_reason"].is_string() {
            found.insert("finish_reason".into(), choice["finish_reason"].clone());
        }
    }
    choices.into_iter().map(Value::Object).collect()
}

fn append(value: &mut Value, text: &str) {
    *value = (value.as_str().unwrap().to_owned() + text).into();
}

#[track_caller]
fn call_together(calls: &mut Value, piece: &Value) {
    let (calls, index) = (calls.as_array_mut().unwrap(), piece["index"].as_u64().unwrap() as usize);
    let arguments = piece["function"]["arguments"].as_str().unwrap();
    if index == calls.len() {
        assert_eq!(piece["type"], "function", "what a call is comes first");
        assert!(piece["id"].is_string() && piece["function"]["name"].is_string());
        calls.push(json!({"id": piece["id"], "function": piece["function"]}));
        return;
    }
    assert_eq!(index, calls.len() - 1, "one call after the other");
    assert_eq!(piece.as_object().unwrap().len(), 2, "only more arguments: {piece}");
    append(&mut calls[index]["function"]["arguments"], arguments);
}

/// Choices of a whole answer, to be compared with those of a stream.
fn choices(found: &Value) -> Vec<Value> {
    let choice = |choice: &Value| {
        let mut flat = Map::new();
        if let Some(text) = choice["message"]["content"].as_str() {
            flat.insert("content".into(), text.into());
        }
        if let Some(calls) = choice["message"]["tool_calls"].as_array() {
            let call = |call: &Value| json!({"id": call["id"], "function": call["function"]});
            flat.insert("tool_calls".into(), calls.iter().map(call).collect());
        }
        let tokens = choice["logprobs"]["content"].as_array().cloned().unwrap_or_default();
        flat.insert("logprobs".into(), tokens.into());
        flat.insert("finish_reason".into(), choice["finish_reason"].clone());
        Value::Object(flat)
    };
    found["choices"].as_array().unwrap().iter().map(choice).collect()
}

/// All but the ids of calls, which are never the same; that they are not is checked here.
#[track_caller]
fn without_ids(choices: &[Value]) -> Vec<Value> {
    let mut choices = choices.to_vec();
    let mut ids = BTreeSet::new();
    for choice in &mut choices {
        for call in choice.get_mut("tool_calls").and_then(Value::as_array_mut).into_iter().flatten() {
            let id = call.as_object_mut().unwrap().remove("id").unwrap();
            assert!(ids.insert(id.as_str().unwrap().to_owned()), "{id} is there twice");
        }
    }
    choices
}

/// Asks for whole answers and for streamed ones, which are the same.
#[track_caller]
fn both_ways(server: &Server, body: &Value) -> Vec<Value> {
    let whole = choices(&server.post("/v1/chat/completions", body).ok());
    let pieces = together(&server.post("/v1/chat/completions", &streamed(body)));
    assert_eq!(without_ids(&pieces), without_ids(&whole), "{body}");
    whole
}

#[test]
fn answers_of_a_schema_validate_whole_and_streamed() {
    let server = Toy::new().serve(TEMPLATE, &["--stages", "2"]);
    let schemas = [
        json!({"type": "object", "properties": {"colour": {"enum": ["größer", "東京", "🚀🚀"]}, "n": {"type": "integer",
            "minimum": 1, "maximum": 99}}, "required": ["colour", "n"], "additionalProperties": false}),
        json!({"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 3}),
        json!({"anyOf": [{"const": null}, {"type": "string", "maxLength": 6}]}),
        json!({"type": "object", "properties": {"when": {"type": "string", "pattern": "^[0-9]{4}-[01][0-9]$"},
            "next": {"$ref": "#/$defs/next"}}, "required": ["when", "next"], "additionalProperties": false,
            "$defs": {"next": {"type": ["boolean", "null"]}}}),
    ];
    let (mut ended, mut spelt) = (0, String::new());
    for (i, schema) in schemas.iter().enumerate() {
        for seed in 0..3 {
            let fields = json!({"response_format": format_of(schema), "n": 2, "seed": seed, "logprobs": true});
            for choice in both_ways(&server, &asked(fields)) {
                if choice["finish_reason"] == "length" {
                    // White space may be long.
                    continue;
                }
                assert_eq!(choice["finish_reason"], "stop");
                let text = choice["content"].as_str().unwrap();
                let value: Value = serde_json::from_str(text).unwrap_or_else(|error| panic!("{error}: {text}"));
                assert!(jsonschema::is_valid(schema, &value), "{schema}: {text}");
                ended += 1;
                spelt += &format!("{i}: {value}\n");
            }
        }
    }
    assert!(ended >= 16, "{ended} of 24 came to an end");
    assert!(["größer", "東京", "🚀🚀"].iter().any(|word| spelt.contains(word)), "{spelt}");
}

#[test]
fn other_forms_hold_and_stop_texts_end_them() {
    let server = Toy::new().serve(TEMPLATE, &[]);
    let texts = |fields: Value| -> Vec<String> {
        let choices = both_ways(&server, &asked(fields));
        assert!(choices.iter().all(|choice| choice["finish_reason"] == "stop"), "{choices:?}");
        choices.iter().map(|choice| choice["content"].as_str().unwrap().to_owned()).collect()
    };
    let date = json!({"type": "regex", "pattern": "[0-9]{4}-[0-9]{2}"});
    let whole = texts(json!({"response_format": date, "n": 3, "seed": 1}));
    for text in &whole {
        let (year, month) = text.split_once('-').unwrap();
        assert!(year.len() == 4 && month.len() == 2 && (year.to_owned() + month).parse::<u32>().is_ok(), "{text}");
    }
    let cut = texts(json!({"response_format": date, "n": 3, "seed": 1, "stop": "-"}));
    assert_eq!(cut, whole.iter().map(|text| text[..4].to_owned()).collect::<Vec<_>>());
    let grammar = json!({"type": "grammar", "grammar": "start: \"é\" (\"日\" | \"本\")+ \"!\""});
    for text in texts(json!({"response_format": grammar, "seed": 5, "logit_bias": {"0": 5}})) {
        let middle = text.strip_prefix("é").and_then(|rest| rest.strip_suffix("!")).unwrap();
        assert!(!middle.is_empty() && middle.chars().all(|c| c == '日' || c == '本'), "{text}");
    }
    let found =
        choices(&server.post("/v1/chat/completions", &asked(json!({"response_format": {"type": "text"}}))).ok());
    assert!(found[0]["content"].is_string());
}

fn tool(name: &str, parameters: &Value) -> Value {
    json!({"type": "function", "function": {"name": name, "description": "looks", "parameters": parameters, "strict": true}})
}

fn parameters() -> Value {
    json!({"type": "object", "properties": {"city": {"enum": ["Rome", "Köln"]}, "days": {"type": "integer", "minimum": 1,
        "maximum": 7}}, "required": ["city", "days"], "additionalProperties": false})
}

#[track_caller]
fn check_calls(choice: &Value, names: &[&str]) {
    assert_eq!(choice["finish_reason"], "tool_calls", "{choice}");
    assert_eq!(choice.get("content"), None, "{choice}");
    let calls = choice["tool_calls"].as_array().unwrap();
    assert!(!calls.is_empty());
    for call in calls {
        assert!(names.contains(&call["function"]["name"].as_str().unwrap()), "{call}");
        let arguments = serde_json::from_str(call["function"]["arguments"].as_str().unwrap()).unwrap();
        assert!(jsonschema::is_valid(&parameters(), &arguments), "{call}");
    }
}

#[test]
fn tools_that_must_be_called_are_whole_and_streamed() {
    for toy in [Toy::new(), Toy::with_special_marks()] {
        let server = toy.serve(TEMPLATE, &[]);
        let tools = json!([tool("weather", &parameters()), tool("news", &parameters())]);
        let named = json!({"type": "function", "function": {"name": "news"}});
        for (choice, names) in [(json!("required"), &["weather", "news"][..]), (named, &["news"])] {
            let fields = json!({"tools": tools, "tool_choice": choice, "parallel_tool_calls": false, "n": 2, "seed": 3,
                "logprobs": true, "top_logprobs": 1});
            for choice in both_ways(&server, &asked(fields)) {
                check_calls(&choice, names);
                let tokens = choice["logprobs"].as_array().unwrap();
                let bytes = tokens.iter().flat_map(|token| token["bytes"].as_array().unwrap());
                let bytes: Vec<u8> = bytes.map(|byte| byte.as_u64().unwrap() as u8).collect();
                let spelt = String::from_utf8(bytes).unwrap();
                assert!(spelt.starts_with("<tool_call>\n{") && spelt.ends_with("}\n</tool_call>"), "{spelt:?}");
            }
        }
        let free = json!({"tools": tools, "tool_choice": "none", "max_tokens": 12});
        let found = server.post("/v1/chat/completions", &asked(free)).ok();
        let message = &found["choices"][0]["message"];
        assert!(message["content"].is_string() && message.get("tool_calls").is_none(), "{found}");
    }
}

#[test]
fn several_calls_at_once_are_one_after_the_other() {
    let server = Toy::new().serve(TEMPLATE, &[]);
    let nothing = json!({"type": "object", "properties": {}, "additionalProperties": false});
    let fields = json!({"tools": [tool("f", &nothing), tool("g", &nothing)], "tool_choice": "required", "seed": 1,
        "max_tokens": 500, "n": 4});
    let found = both_ways(&server, &asked(fields));
    let calls = |choice: &Value| choice["tool_calls"].as_array().unwrap().len();
    assert!(found.iter().any(|choice| calls(choice) > 1), "{found:?}");
    assert!(found.iter().all(|choice| calls(choice) > 0 && choice.get("content").is_none()), "{found:?}");
}

#[test]
fn with_tools_that_may_be_called_an_answer_is_a_call_or_of_its_form() {
    let server = Toy::new().serve(TEMPLATE, &[]);
    let schema = json!({"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 2});
    let mut ended = BTreeSet::new();
    // A push towards `<` begins a call, one towards `[` an answer; neither comes later in them.
    for (first, reason) in [("27", "tool_calls"), ("58", "stop")] {
        for seed in 0..3 {
            let fields = json!({"tools": [tool("weather", &parameters())], "response_format": format_of(&schema),
                "seed": seed, "parallel_tool_calls": false, "logit_bias": {first: 100}});
            let choice = &both_ways(&server, &asked(fields))[0];
            if choice["finish_reason"] == "length" {
                // White space may be long.
                continue;
            }
            assert_eq!(choice["finish_reason"], reason);
            match choice["content"].as_str() {
                Some(text) => assert!(jsonschema::is_valid(&schema, &serde_json::from_str(text).unwrap()), "{text}"),
                None => check_calls(choice, &["weather"]),
            }
            ended.insert(reason);
        }
    }
    assert_eq!(ended.len(), 2, "both come to an end: {ended:?}");
}

/// What the model saw is known by its length: that of the same conversation as plain text.
#[test]
fn calls_and_results_go_back_through_the_template() {
    let server = Toy::new().serve(TEMPLATE, &["--no-prefix-cache"]);
    let call =
        json!({"id": "c1", "type": "function", "function": {"name": "weather", "arguments": "{\"city\": \"Rome\"}"}});
    let messages = json!([{"role": "user", "content": "Rome?"},
        {"role": "assistant", "content": null, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "sunny"}]);
    let body = json!({"messages": messages, "max_tokens": 4, "temperature": 0});
    let found = server.post("/v1/chat/completions", &body).ok();
    let text = "<|im_start|>user \nRome?<|im_end|>\n<|im_start|>assistant \n<tool_call>{\"name\": \"weather\", \
                \"arguments\": {\"city\": \"Rome\"}}</tool_call><|im_end|>\n<|im_start|>tool weather\nsunny<|im_end|>\n\
                <|im_start|>assistant";
    // Rendered by a template that is nothing but this text.
    let plain = Toy::new().serve(&format!("{{{{ {} }}}}", json!(text)), &["--no-prefix-cache"]);
    let same = plain.post("/v1/chat/completions", &asked(json!({"max_tokens": 4, "temperature": 0}))).ok();
    assert_eq!(found["usage"], same["usage"]);
    assert_eq!(found["choices"], same["choices"]);
    let mut answered = messages.as_array().unwrap().clone();
    answered.push(found["choices"][0]["message"].clone());
    answered.push(json!({"role": "user", "content": "And Bonn?"}));
    server.post("/v1/chat/completions", &json!({"messages": answered, "max_tokens": 2})).ok();
}

#[test]
fn forms_and_tools_that_cannot_be_are_refused_by_name() {
    let server = Toy::new().serve(TEMPLATE, &[]);
    let refused = |server: &Server, fields: Value, param: &str, code: &str| {
        for body in [asked(fields.clone()), streamed(&asked(fields.clone()))] {
            let response = server.post("/v1/chat/completions", &body);
            let error = &response.json()["error"];
            let found = (response.status, error["param"].as_str(), error["code"].as_str());
            assert_eq!(found, (400, Some(param), Some(code)), "{fields}: {error}");
        }
    };
    let check = |fields: Value, param: &str| refused(&server, fields, param, "invalid_value");
    let format = |format: Value| json!({"response_format": format});
    let schema = |schema: Value| format(format_of(&schema));
    check(format(json!("json")), "response_format");
    check(format(json!({"type": "xml"})), "response_format.type");
    check(format(json!({"type": "json_schema"})), "response_format.json_schema");
    check(format(json!({"type": "json_object", "pattern": "a"})), "response_format.pattern");
    check(schema(json!({"type": "strin"})), "response_format.json_schema.schema");
    check(schema(json!([1])), "response_format.json_schema.schema");
    check(schema(json!({"$ref": "http://example.com/a.json"})), "response_format.json_schema.schema");
    check(schema(json!({"const": "x".repeat(150_000)})), "response_format.json_schema.schema");
    check(format(json!({"type": "regex", "pattern": "a("})), "response_format.pattern");
    check(format(json!({"type": "grammar", "grammar": "start: nothing"})), "response_format.grammar");
    refused(&server, format(json!({"type": "text", "colour": 1})), "response_format.colour", "unknown_parameter");
    let tools = |tools: Value| json!({"tools": tools});
    let good = tool("f", &parameters());
    let with = |more: Value| {
        let mut fields = json!({"tools": [good]});
        fields.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        fields
    };
    check(tools(json!({})), "tools");
    check(tools(json!([{"type": "function"}])), "tools[0]");
    check(tools(json!([{"type": "retrieval", "function": {"name": "f"}}])), "tools[0].type");
    check(tools(json!([good, tool("a b", &parameters())])), "tools[1].function.name");
    check(tools(json!([good, good])), "tools[1].function.name");
    check(tools(json!([tool("f", &json!({"type": "array"}))])), "tools[0].function.parameters");
    check(
        tools(json!([good, tool("g", &json!({"properties": {"a": {"type": "no"}}}))])),
        "tools[1].function.parameters",
    );
    check(tools((0..129).map(|i| tool(&format!("f{i}"), &parameters())).collect()), "tools");
    check(with(json!({"tool_choice": "any"})), "tool_choice");
    check(with(json!({"tool_choice": {"type": "function"}})), "tool_choice");
    let named = json!({"type": "function", "function": {"name": "g"}});
    check(with(json!({"tool_choice": named})), "tool_choice.function.name");
    check(json!({"tool_choice": "required"}), "tool_choice");
    check(with(json!({"tool_choice": "required", "response_format": {"type": "json_object"}})), "response_format");
    check(with(json!({"response_format": {"type": "regex", "pattern": "a"}})), "response_format.type");
    check(with(json!({"response_format": format_of(&json!({"type": "no"}))})), "response_format.json_schema.schema");
    check(with(json!({"parallel_tool_calls": "yes"})), "parallel_tool_calls");
    let result = json!({"role": "tool", "content": "5"});
    check(json!({"messages": [{"role": "user", "content": "a"}, result]}), "messages[1].tool_call_id");
    // Neither tools nor what the system says have a place in such a template, nor in one that refuses them.
    for template in ["{{ messages[-1].content }}", "{% if messages[0].role == 'system' %}{{ 1 / 0 }}{% endif %}"] {
        let deaf = Toy::new().serve(template, &[]);
        refused(&deaf, tools(json!([good])), "tools", "invalid_value");
    }
    // And all is well after so much that was not.
    check_calls(
        &both_ways(&server, &asked(with(json!({"tool_choice": "required", "parallel_tool_calls": false, "seed": 1}))))
            [0],
        &["f"],
    );
}

#[test]
fn a_form_that_becomes_too_complex_ends_its_request() {
    let server = Toy::new().serve(TEMPLATE, &[]);
    // It compiles, and then has more states for every letter.
    let format = json!({"type": "regex", "pattern": "(.{1,100}){1,100}(.*a.{200})+"});
    let body = asked(json!({"response_format": format, "seed": 1, "n": 2}));
    let check = |error: &Value| {
        let error = &error["error"];
        assert_eq!(
            (error["param"].as_str(), error["code"].as_str()),
            (Some("response_format.pattern"), Some("form_too_complex"))
        );
    };
    let whole = server.post("/v1/chat/completions", &body);
    assert_eq!(whole.status, 400);
    check(&whole.json());
    let (chunks, last) = server.post("/v1/chat/completions", &streamed(&body)).events();
    assert!(chunks.len() > 2, "it had begun");
    check(&serde_json::from_str(&last).unwrap());
    super::eventually("nothing is left", || super::metric(&server, "kv_pages_held") == 0.0);
}

/// A template that knows of no tools: a system message tells of them, and calls are found all the same.
#[test]
fn a_model_whose_template_knows_no_tools_is_told_of_them() {
    let toy = Toy::new();
    let server = Server::start(&["-m", toy.path.to_str().unwrap(), "--ctx", "2048"]);
    let fields = json!({"tools": [tool("weather", &parameters())], "tool_choice": "required", "parallel_tool_calls": false,
        "seed": 2});
    let with = asked(fields);
    check_calls(&both_ways(&server, &with)[0], &["weather"]);
    // The same where the template has a form of calls that is not known here.
    let template = "{% if tools %}Call as <invoke>…</invoke>: {{ tools }}{% endif %}{{ messages | map(attribute='content') | join }}";
    check_calls(&both_ways(&toy.serve(template, &[]), &with)[0], &["weather"]);
    let tokens =
        |body: &Value| server.post("/v1/chat/completions", body).ok()["usage"]["prompt_tokens"].as_u64().unwrap();
    assert!(tokens(&with) > tokens(&asked(json!({}))) + 100);
    let long = Server::start(&["-m", &model(TINY)]);
    let refused = long.post("/v1/chat/completions", &with);
    assert_eq!((refused.status, &refused.json()["error"]["code"]), (400, &"context_length_exceeded".into()));
}

#[test]
fn the_document_describes_forms_and_tools() {
    let server = Server::start(&["-m", &model(TINY)]);
    let document = server.get("/openapi.json").ok();
    let schemas = document["components"]["schemas"].as_object().unwrap();
    let request = schemas["ChatRequest"]["properties"].as_object().unwrap();
    for field in ["response_format", "tools", "tool_choice", "parallel_tool_calls"] {
        assert!(request.contains_key(field), "{field}");
    }
    for name in ["ResponseFormat", "NamedSchema", "ToolSpec", "ToolChoice", "ToolCall", "CallDelta"] {
        assert!(schemas.contains_key(name), "{name} in {:?}", schemas.keys());
    }
    // Every type that another speaks of is there.
    let text = document.to_string();
    for reference in text.split("#/components/schemas/").skip(1) {
        let name = reference.split('"').next().unwrap();
        assert!(schemas.contains_key(name), "{name}");
    }
}
