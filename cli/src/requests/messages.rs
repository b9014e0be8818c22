//! Messages of a conversation as OpenAI's API writes them.

use pp_engine::chat_template::Message;
use serde::Deserialize;
use serde_json::{Map, Value};
use utoipa::ToSchema;

use super::choosing::Invalid;

/// Who may speak.
const ROLES: [&str; 5] = ["system", "developer", "user", "assistant", "tool"];

/// One message of a conversation.
#[derive(Clone, Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct ChatMessage {
    /// Who speaks: `system` or `developer`, `user`, `assistant`, `tool`.
    #[schema(pattern = "^(system|developer|user|assistant|tool)$")]
    pub role: String,
    /// What is said.
    #[serde(default)]
    pub content: Option<Content>,
    /// The speaker's name; templates do not show it.
    #[serde(default)]
    #[expect(dead_code, reason = "taken and not used")]
    pub name: Option<String>,
    /// What an assistant refused, as clients send it back.
    #[serde(default)]
    #[expect(dead_code, reason = "taken and not used")]
    pub refusal: Option<String>,
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
    messages.iter().enumerate().map(|(index, message)| message.to_template(&format!("{param}[{index}]"))).collect()
}

impl ChatMessage {
    fn to_template(&self, param: &str) -> Result<Message, Invalid> {
        let is_known = ROLES.contains(&self.role.as_str());
        Invalid::unless(is_known, &format!("{param}.role"), "system, developer, user, assistant or tool")?;
        // The newer name of the same; templates know the older one.
        let role = if self.role == "developer" { "system" } else { self.role.as_str() };
        let content = match &self.content {
            Some(Content::Text(text)) => text.clone(),
            Some(Content::Parts(parts)) => {
                let texts = parts.iter().enumerate();
                texts.map(|(index, part)| part.text(&format!("{param}.content[{index}]"))).collect::<Result<_, _>>()?
            }
            None => return Err(Invalid::new(format!("{param}.content"), "expected a string or an array of parts")),
        };
        Ok(Message::new(role, content))
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
    use super::*;

    fn read(json: &str) -> Result<Vec<Message>, Invalid> {
        conversation(&serde_json::from_str::<Vec<ChatMessage>>(json).expect(json), "messages")
    }

    #[test]
    fn texts_and_parts_are_put_to_the_template() {
        let json = r#"[{"role": "developer", "content": "a"},
            {"role": "user", "content": [{"type": "text", "text": "b"}, {"type": "text", "text": "c"}], "name": "x"}]"#;
        assert_eq!(read(json).unwrap(), [Message::new("system", "a"), Message::new("user", "bc")]);
    }

    #[test]
    fn what_no_model_reads_is_named() {
        let check = |json: &str, param: &str| assert_eq!(read(json).expect_err(json).param, param);
        check("[]", "messages");
        check(r#"[{"role": "king", "content": "a"}]"#, "messages[0].role");
        check(r#"[{"role": "user"}]"#, "messages[0].content");
        check(r#"[{"role": "user", "content": null}]"#, "messages[0].content");
        let image = r#"{"type": "image_url", "image_url": {"url": "data:"}}"#;
        let json = format!(r#"[{{"role": "user", "content": [{{"type": "text", "text": "b"}}, {image}]}}]"#);
        check(&json, "messages[0].content[1].type");
        check(r#"[{"role": "user", "content": [{"type": "text"}]}]"#, "messages[0].content[0].text");
    }
}
