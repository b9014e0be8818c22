//! Tools for models whose chat template knows of none: described in a system message, calls and results as texts.

use pp_engine::chat_template::Message;
use pp_engine::tools::ToolFormat;
use serde_json::{Value, json};

use crate::requests::tools::ToolUse;

/// The same conversation in messages of system, user and assistant that are texts.
pub(super) fn conversation(messages: &[Message], tools: Option<&ToolUse>, format: ToolFormat) -> Vec<Message> {
    let mut plain: Vec<Message> = Vec::with_capacity(messages.len() + 1);
    let mut is_after_result = false;
    for message in messages {
        let calls = message.extra.get("tool_calls").and_then(Value::as_array);
        let is_result = message.role == "tool";
        let message = match calls {
            _ if is_result => Message::new("user", format!("<tool_response>\n{}\n</tool_response>", message.content)),
            Some(calls) => {
                let text = Some(message.content.clone()).filter(|text| !text.is_empty());
                let parts: Vec<String> = text.into_iter().chain([written(calls, format)]).collect();
                Message::new(message.role.clone(), parts.join("\n"))
            }
            None => message.clone(),
        };
        match plain.last_mut().filter(|_| is_result && is_after_result) {
            // Results of calls that were made at once are one message.
            Some(last) => last.content += &format!("\n{}", message.content),
            None => plain.push(message),
        }
        is_after_result = is_result;
    }
    if let Some(tools) = tools {
        let text = description(tools, format);
        match plain.first_mut().filter(|first| first.role == "system") {
            Some(system) => system.content += &format!("\n\n{text}"),
            None => plain.insert(0, Message::new("system", text)),
        }
    }
    plain
}

/// What the tools are and how they are called.
fn description(tools: &ToolUse, format: ToolFormat) -> String {
    let functions = tools.shown.as_array().into_iter().flatten().map(|tool| tool["function"].to_string());
    let functions: Vec<String> = functions.collect();
    let example = json!({"function": {"name": "NAME", "arguments": {"KEY": "VALUE"}}});
    format!(
        "You can call these functions, described in JSON, one a line:\n{}\nTo call one, answer with its name and its \
         arguments in this form and nothing else:\n{}",
        functions.join("\n"),
        written(&[example], format)
    )
}

/// Calls as the model is to write them.
fn written(calls: &[Value], format: ToolFormat) -> String {
    let key = if format == ToolFormat::Llama { "parameters" } else { "arguments" };
    let call = |call: &Value| {
        let function = &call["function"];
        format!("{{\"name\": {}, \"{key}\": {}}}", function["name"], function["arguments"])
    };
    let calls: Vec<String> = calls.iter().map(call).collect();
    match format {
        ToolFormat::Hermes => {
            calls.iter().map(|call| format!("<tool_call>\n{call}\n</tool_call>")).collect::<Vec<_>>().join("\n")
        }
        ToolFormat::Mistral => format!("[TOOL_CALLS] [{}]", calls.join(", ")),
        ToolFormat::Llama => calls.join("\n"),
    }
}

#[cfg(test)]
mod tests {
    use pp_engine::head::FinishReason;

    use super::*;
    use crate::requests::tools::{CallIds, FunctionCall, ToolCall, read};

    fn call(name: &str) -> Value {
        let function = FunctionCall { name: name.into(), arguments: "{\"a\": 1}".into() };
        ToolCall { id: "1".into(), kind: "function".into(), function }.to_template("").unwrap()
    }

    #[test]
    fn calls_and_results_are_texts_that_read_back() {
        for (format, _) in ToolFormat::ALL {
            let mut asked = Message::new("assistant", "");
            asked.extra.insert("tool_calls".into(), json!([call("f")]));
            let messages = [Message::new("user", "x"), asked, Message::new("tool", "5"), Message::new("tool", "6")];
            let plain = conversation(&messages, None, format);
            let roles: Vec<&str> = plain.iter().map(|message| message.role.as_str()).collect();
            assert_eq!(roles, ["user", "assistant", "user"]);
            let (text, calls, _) = read(&plain[1].content, format, FinishReason::Stop, &CallIds::any());
            assert_eq!((text.as_str(), calls[0].function.name.as_str()), ("", "f"), "{}", plain[1].content);
            assert_eq!(calls[0].function.arguments, "{\"a\":1}");
            assert!(plain[2].content.contains("5\n") && plain[2].content.contains("6\n"));
        }
    }

    #[test]
    fn tools_are_described_once_behind_what_the_system_says() {
        let shown = json!([{"type": "function", "function": {"name": "f"}}]);
        let tools = ToolUse { shown, tools: vec![], required: false, parallel: true };
        let messages = [Message::new("system", "Be brief."), Message::new("user", "x")];
        for messages in [&messages[..], &messages[1..]] {
            let plain = conversation(messages, Some(&tools), ToolFormat::Hermes);
            assert_eq!((plain.len(), plain[0].role.as_str()), (2, "system"));
            assert!(plain[0].content.contains("{\"name\":\"f\"}") && plain[0].content.contains("<tool_call>"));
        }
        assert_eq!(conversation(&messages, None, ToolFormat::Hermes), messages);
    }
}
