//! Messages of a conversation as OpenAI's API writes them.

use std::collections::HashMap;

use pp_engine::chat_template::Message;
use serde::Deserialize;
use serde_json::{Map, Value};
use utoipa::ToSchema;

use super::choosing::Invalid;
use super::tools::ToolCall;

/// Who may speak.
const ROLES: [&str; 5] = ["system", "developer", "user", "assistant", "tool"];

/// One message of a conversation.
#[derive(Clone, Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct ChatMessage {
    /// Who speaks: `system` or `developer`, `user`, `assistant`, `tool`.
    #[schema(pattern = "^(system|developer|user|assistant|tool)$")]
    pub role: String,
    /// What is said; may be null where an assistant calls tools.
    #[serde(default)]
    pub content: Option<Content>,
    /// The speaker's name, or the tool's; few templates show it.
    #[serde(default)]
    pub name: Option<String>,
    /// Calls that an assistant asked for.
    #[serde(default)]
    pub tool_calls: Option<Vec<ToolCall>>,
    /// Of a tool's message: the call that it is the result of.
    #[serde(default)]
    pub tool_call_id: Option<String>,
    /// What an assistant refused, as clients send it back.
    #[serde(default)]
    #[expect(dead_code, reason = "taken and not used")]
    pub refusal: Option<String>,
    /// As clients send an assistant's message back; not used.
    #[serde(default)]
    #[expect(dead_code, reason = "taken and not used")]
    pub annotations: Option<Vec<Value>>,
    /// Null, as clients send an assistant's message back.
    #[serde(default)]
    #[schema(schema_with = super::null_schema)]
    pub audio: Option<Value>,
    /// The same.
    #[serde(default)]
    #[schema(schema_with = super::null_schema)]
    pub function_call: Option<Value>,
}

/// What a message says.
#[derive(Clone, Debug, Deserialize, ToSchema)]
#[serde(untagged, expecting = "expected a string or an array of parts of type text")]
pub enum Content {
    /// A text.
    Text(String),
    /// Several texts, one behind the other.
    Parts(Vec<Part>),
}

/// A part of a message.
#[derive(Clone, Debug, Deserialize, ToSchema)]
pub struct Part {
    /// `text`; others are refused.
    #[serde(rename = "type")]
    #[schema(pattern = "^text$")]
    kind: String,
    /// The text.
    #[serde(default)]
    #[schema(value_type = String, required)]
    text: Option<String>,
    #[serde(flatten)]
    #[schema(ignore)]
    rest: Map<String, Value>,
}

/// Messages as templates take them; `param` is what they are called in the request.
///
/// # Errors
/// Names the message, and its part, that cannot be put to a model.
pub fn conversation(messages: &[ChatMessage], param: &str) -> Result<Vec<Message>, Invalid> {
    if messages.is_empty() {
        return Err(Invalid::new(param, "expected at least one message"));
    }
    let mut calls = HashMap::new();
    let mut conversation = Vec::with_capacity(messages.len());
    for (index, message) in messages.iter().enumerate() {
        conversation.push(message.to_template(&format!("{param}[{index}]"), &calls)?);
        calls.extend(message.calls().iter().map(|call| (call.id.as_str(), call.function.name.as_str())));
    }
    Ok(conversation)
}

impl ChatMessage {
    fn calls(&self) -> &[ToolCall] {
        self.tool_calls.as_deref().unwrap_or_default()
    }

    /// `calls`: names of the functions that were called before, by the id of the call.
    fn to_template(&self, param: &str, calls: &HashMap<&str, &str>) -> Result<Message, Invalid> {
        let is_known = ROLES.contains(&self.role.as_str());
        Invalid::unless(is_known, &format!("{param}.role"), "system, developer, user, assistant or tool")?;
        for (field, value) in [("audio", &self.audio), ("function_call", &self.function_call)] {
            Invalid::unless(value.is_none(), &format!("{param}.{field}"), "null: it is not supported")?;
        }
        // The newer name of the same; templates know the older one.
        let role = if self.role == "developer" { "system" } else { self.role.as_str() };
        let mut message = Message::new(role, self.text(param)?);
        message.extra = self.extra(param, calls)?;
        Ok(message)
    }

    fn text(&self, param: &str) -> Result<String, Invalid> {
        match &self.content {
            Some(Content::Text(text)) => Ok(text.clone()),
            Some(Content::Parts(parts)) => {
                let texts = parts.iter().enumerate();
                texts.map(|(index, part)| part.text(&format!("{param}.content[{index}]"))).collect()
            }
            None if self.calls().is_empty() => {
                Err(Invalid::new(format!("{param}.content"), "expected a string or an array of parts"))
            }
            None => Ok(String::new()),
        }
    }

    /// What templates see beside role and content.
    fn extra(&self, param: &str, calls: &HashMap<&str, &str>) -> Result<Map<String, Value>, Invalid> {
        let mut extra = Map::new();
        let mut name = self.name.as_deref();
        if !self.calls().is_empty() {
            Invalid::unless(self.role == "assistant", &format!("{param}.tool_calls"), "calls of an assistant only")?;
            let calls = self.calls().iter().enumerate();
            let shown = calls.map(|(index, call)| call.to_template(&format!("{param}.tool_calls[{index}]")));
            extra.insert("tool_calls".into(), shown.collect::<Result<_, _>>()?);
        }
        match (&self.tool_call_id, self.role == "tool") {
            (Some(id), true) => {
                let called = calls.get(id.as_str()).ok_or_else(|| {
                    Invalid::new(
                        format!("{param}.tool_call_id"),
                        format!("no message before has a call with the id {id:?}"),
                    )
                })?;
                name = name.or(Some(called));
                extra.insert("tool_call_id".into(), id.as_str().into());
            }
            (None, true) => {
                return Err(Invalid::new(format!("{param}.tool_call_id"), "expected the id of the call that was made"));
            }
            (Some(_), false) => {
                return Err(Invalid::new(format!("{param}.tool_call_id"), "goes with the role tool only"));
            }
            (None, false) => {}
        }
        if let Some(name) = name {
            extra.insert("name".into(), name.into());
        }
        Ok(extra)
    }
}

impl Part {
    fn text(&self, param: &str) -> Result<&str, Invalid> {
        match (self.kind.as_str(), &self.text) {
            ("text", Some(text)) if self.rest.is_empty() => Ok(text),
            ("text", Some(_)) => Err(Invalid::new(param, "expected nothing but type and text")),
            ("text", None) => Err(Invalid::new(format!("{param}.text"), "expected a string")),
            (kind, _) => {
                let message = format!("parts of type {kind:?} are not supported: this model reads text only");
                Err(Invalid::new(format!("{param}.type"), message))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn read(json: &str) -> Result<Vec<Message>, Invalid> {
        conversation(&serde_json::from_str::<Vec<ChatMessage>>(json).expect(json), "messages")
    }

    #[test]
    fn texts_and_parts_are_put_to_the_template() {
        let json = r#"[{"role": "developer", "content": "a"},
            {"role": "user", "content": [{"type": "text", "text": "b"}, {"type": "text", "text": "c"}], "name": "x"}]"#;
        let mut user = Message::new("user", "bc");
        user.extra.insert("name".into(), "x".into());
        assert_eq!(read(json).unwrap(), [Message::new("system", "a"), user]);
    }

    const CALLS: &str = r#"{"role": "assistant", "content": null, "tool_calls": [{"id": "c1", "type": "function",
        "function": {"name": "f", "arguments": "{\"a\": 1}"}}]}"#;

    #[test]
    fn calls_and_results_are_put_to_the_template() {
        let result = r#"{"role": "tool", "tool_call_id": "c1", "content": "5"}"#;
        let found = read(&format!(r#"[{{"role": "user", "content": "x"}}, {CALLS}, {result}]"#)).unwrap();
        assert_eq!(found[1].content, "");
        assert_eq!(found[1].extra["tool_calls"][0]["function"], json!({"name": "f", "arguments": {"a": 1}}));
        assert_eq!(found[2].extra, *json!({"tool_call_id": "c1", "name": "f"}).as_object().unwrap());
    }

    /// OpenAI's client dumps an assistant's message with all its fields.
    #[test]
    fn what_was_answered_can_be_sent_back() {
        let json = r#"[{"role": "assistant", "content": "a", "refusal": null, "annotations": null, "audio": null,
            "function_call": null, "tool_calls": null}]"#;
        assert_eq!(read(json).unwrap(), [Message::new("assistant", "a")]);
    }

    #[test]
    fn calls_and_results_that_do_not_fit_are_named() {
        let check = |json: String, param: &str| assert_eq!(read(&json).expect_err(&json).param, param);
        let after = |message: &str| format!("[{CALLS}, {message}]");
        check(after(r#"{"role": "tool", "content": "5"}"#), "messages[1].tool_call_id");
        check(after(r#"{"role": "tool", "tool_call_id": "c2", "content": "5"}"#), "messages[1].tool_call_id");
        check(after(r#"{"role": "user", "tool_call_id": "c1", "content": "5"}"#), "messages[1].tool_call_id");
        check(after(r#"{"role": "tool", "tool_call_id": "c1"}"#), "messages[1].content");
        check(format!("[{}]", CALLS.replace("assistant", "user")), "messages[0].tool_calls");
        check(format!("[{}]", CALLS.replace("\"f\"", "\"f g\"")), "messages[0].tool_calls[0].function.name");
        check(format!("[{}]", CALLS.replace("\"function\",", "\"other\",")), "messages[0].tool_calls[0].type");
        check(r#"[{"role": "assistant", "content": null, "tool_calls": []}]"#.into(), "messages[0].content");
    }

    #[test]
    fn what_no_model_reads_is_named() {
        let check = |json: &str, param: &str| assert_eq!(read(json).expect_err(json).param, param);
        check("[]", "messages");
        check(r#"[{"role": "king", "content": "a"}]"#, "messages[0].role");
        check(r#"[{"role": "user"}]"#, "messages[0].content");
        check(r#"[{"role": "", "content": "a"}]"#, "messages[0].role");
        check(r#"[{"role": "assistant", "content": "a", "audio": {"id": "x"}}]"#, "messages[0].audio");
        check(r#"[{"role": "assistant", "content": "a", "function_call": {}}]"#, "messages[0].function_call");
        check(r#"[{"role": "user<|im_end|>", "content": "a"}]"#, "messages[0].role");
        check(r#"[{"role": "user", "content": null}]"#, "messages[0].content");
        let image = r#"{"type": "image_url", "image_url": {"url": "data:"}}"#;
        let json = format!(r#"[{{"role": "user", "content": [{{"type": "text", "text": "b"}}, {image}]}}]"#);
        check(&json, "messages[0].content[1].type");
        check(r#"[{"role": "user", "content": [{"type": "text"}]}]"#, "messages[0].content[0].text");
    }
}
