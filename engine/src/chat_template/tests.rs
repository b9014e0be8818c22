use serde_json::json;

use super::*;

fn template(source: &str) -> ChatTemplate {
    ChatTemplate::new(source, "test").unwrap()
}

#[track_caller]
fn check(source: &str, expected: &str) {
    let messages = [Message::new("system", "be <brief>"), Message::new("user", " Hi & bye ")];
    let options = RenderOptions {
        add_generation_prompt: true,
        bos_token: Some("<s>".into()),
        extra: json!({"enable_thinking": false, "n": {"b": [1, 2.5, null], "a": "é\n\u{1}"}})
            .as_object()
            .unwrap()
            .clone(),
        now_unix: Some(1_721_952_000),
        ..RenderOptions::default()
    };
    assert_eq!(template(source).render(&messages, &options).unwrap().text(), expected);
}

#[test]
fn renders_like_transformers() {
    check("{{ bos_token }}{{ eos_token }}{{ messages[1].content }}", "<s> Hi & bye ");
    check("{{ messages[0]['role'] ~ ':' + messages[1]['content'] | trim }}", "system:Hi & bye");
    check(
        "{%- for m in messages[1:] %}\n  {%- if m.role == 'user' %}\n[{{ m.content.strip() }}]\n  {%- endif %}\n{%- endfor %}",
        "[Hi & bye]",
    );
    // trim_blocks and lstrip_blocks: a block tag on a line of its own leaves nothing.
    check("  {% if true %}\nx\n  {% endif %}\ny", "x\ny");
    check(
        "{% for m in messages %}{% if loop.first %}{% continue %}{% endif %}{{ m.role }}{% break %}{% endfor %}",
        "user",
    );
    check("{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}", "2");
    check("{% if add_generation_prompt and not enable_thinking %}<think></think>{% endif %}", "<think></think>");
    check("{% if tools is defined and tools is none and documents is none %}none{% endif %}", "none");
    check("{{ messages[0].content.split('<')[-1].rstrip('>') }}{{ 'Ab'.startswith('A') }}", "briefTrue");
    check("{% for m in messages %}{% generation %}{{ m.role }}{%- endgeneration -%} {% endfor %}", "systemuser");
    check("{{ strftime_now('%d %b %Y') }}", "26 Jul 2024");
    check("{% macro f(x, y='!') %}{{ x }}{{ y }}{% endmacro %}{{ f('a') }}{{ f('b', y='?') }}", "a!b?");
    check("{{ messages | length }}{{ messages[-1].role }}{{ messages[::-1][0].role }}", "2useruser");
    check("{% for key, value in n.items() %}{{ key }}{% endfor %}", "ba");
    check("{{ messages[0].tool_calls is defined }}{{ messages[0].tool_calls or 'no' }}", "Falseno");
}

#[test]
fn json_is_pythons() {
    check("{{ n | tojson }}", r#"{"b": [1, 2.5, null], "a": "é\n\u0001"}"#);
    check("{{ n | tojson(sort_keys=true, ensure_ascii=true) }}", r#"{"a": "\u00e9\n\u0001", "b": [1, 2.5, null]}"#);
    check("{{ messages[0] | tojson }}", r#"{"role": "system", "content": "be <brief>"}"#);
    check("{{ {'k': [1, {}], 'e': []} | tojson(indent=2) }}", "{\n  \"k\": [\n    1,\n    {}\n  ],\n  \"e\": []\n}");
    check("{{ [1, true, '😀'] | tojson(separators=(',', ':')) }}", "[1,true,\"😀\"]");
    check("{{ '😀' | tojson(ensure_ascii=true) }}", r#""\ud83d\ude00""#);
}

#[test]
fn errors_say_where() {
    let message = ChatTemplate::new("a\n{% if %}", "tiny.gguf").unwrap_err().to_string();
    assert!(message.starts_with("tiny.gguf: chat template, line 2: "), "{message}");
    assert!(message.ends_with("give another one with --chat-template FILE"), "{message}");
    let render =
        |source: &str, role: &str| template(source).render(&[Message::new(role, "x")], &RenderOptions::default());
    let refused = ChatTemplateError::Refused { origin: "test".into(), message: "no system role".into() };
    assert_eq!(render("{{ raise_exception('no system role') }}", "user").unwrap_err(), refused);
    let inside = "{% macro f() %}{{ raise_exception('no system role') }}{% endmacro %}{{ f() }}";
    assert_eq!(render(inside, "user").unwrap_err(), refused);
    let failed = render("\n\n{{ messages[0].a.b }}", "user").unwrap_err();
    assert!(matches!(failed, ChatTemplateError::Render { line: 3, .. }), "{failed:?}");
    for role in ["", "user<|im_end|>", "us er", &"x".repeat(65)] {
        assert!(matches!(render("", role), Err(ChatTemplateError::Role { index: 0, .. })), "{role}");
    }
}

#[test]
fn again_rewrites_what_came_from_outside() {
    let options = RenderOptions { tools: Some(json!([{"key": "value"}])), ..RenderOptions::default() };
    let source = "{{ messages[0].role }} {{ messages[0].content | trim }} {{ tools | tojson }} value";
    let rendered = template(source).render(&[Message::new("user", " value ")], &options).unwrap();
    assert_eq!(rendered.to_string(), r#"user value [{"key": "value"}] value"#);
    assert_eq!(rendered.contents().collect::<Vec<_>>(), [" value ", "key", "value"]);
    let again = rendered.again(|text| text.replace("value", "V")).unwrap();
    assert_eq!(again, r#"user V [{"key": "V"}] value"#);
}

#[test]
fn generation_tags_are_replaced_and_nothing_else() {
    let same = "{{ '{%' }} {% if x %}generation{% endif %} {% generations %} {%";
    assert_eq!(without_generation_tags(same), same);
    assert_eq!(without_generation_tags("{%- generation -%}x{%endgeneration%}"), "{%- if true -%}x{%endif%}");
}
