//! `tools`, `tool_choice` and the calls that come of them, as OpenAI's API writes them.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};

use pp_engine::head::FinishReason;
use pp_engine::tools::{Piece, Tool, ToolFormat, ToolParser};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};
use utoipa::ToSchema;

use super::choosing::Invalid;

/// Tools of a request at most, as at OpenAI.
const TOOLS_MAX: usize = 128;
/// Letters of a name at most, as at OpenAI.
const NAME_MAX: usize = 64;

/// A tool that the model may call.
#[derive(Clone, Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct ToolSpec {
    /// `function`
    #[serde(rename = "type")]
    #[schema(pattern = "^function$")]
    pub kind: String,
    /// The function.
    pub function: FunctionSpec,
}

/// A function that the model may have called.
#[derive(Clone, Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct FunctionSpec {
    /// Its name: letters, digits, `_` and `-`.
    #[schema(pattern = "^[A-Za-z0-9_-]{1,64}$")]
    pub name: String,
    /// What it is for.
    #[serde(default)]
    pub description: Option<String>,
    /// JSON Schema of its arguments; none where it takes none.
    #[serde(default)]
    #[schema(value_type = Option<Object>)]
    pub parameters: Option<Value>,
    /// Arguments keep to the schema, whatever this says.
    #[serde(default)]
    #[expect(dead_code, reason = "taken and not used")]
    pub strict: Option<bool>,
}

/// `tool_choice`
#[derive(Clone, Debug, Deserialize, ToSchema)]
#[serde(
    untagged,
    expecting = "expected none, auto, required, or {\"type\": \"function\", \"function\": {\"name\": …}}"
)]
pub enum ToolChoice {
    /// `none`, `auto` or `required`.
    Mode(String),
    /// This one.
    Named {
        /// `function`
        #[serde(rename = "type")]
        kind: String,
        /// Which function.
        function: FunctionName,
    },
}

/// Which function.
#[derive(Clone, Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct FunctionName {
    /// Its name.
    pub name: String,
}

/// Tools that an answer may or must call.
#[derive(Clone, Debug, PartialEq)]
pub struct ToolUse {
    /// As the chat template shows them.
    pub shown: Value,
    /// Those that may be called.
    pub tools: Vec<Tool>,
    /// Whether one must be called.
    pub required: bool,
    /// Whether several may be.
    pub parallel: bool,
}

impl ToolUse {
    /// What a request says of tools; none where there are none, or none may be called.
    ///
    /// # Errors
    /// Names the field that cannot be.
    pub fn new(
        tools: Option<&[ToolSpec]>,
        choice: Option<&ToolChoice>,
        parallel: Option<bool>,
    ) -> Result<Option<ToolUse>, Invalid> {
        let specs = tools.unwrap_or_default();
        if specs.is_empty() {
            return match choice {
                Some(ToolChoice::Mode(mode)) if mode == "none" || mode == "auto" => Ok(None),
                None => Ok(None),
                Some(_) => Err(Invalid::new("tool_choice", "there are no tools to choose from")),
            };
        }
        let mut tools = checked(specs)?;
        let required = match choice {
            None => false,
            Some(ToolChoice::Mode(mode)) => match mode.as_str() {
                "none" => return Ok(None),
                "auto" => false,
                "required" => true,
                _ => return Err(Invalid::new("tool_choice", "expected none, auto, required or a function")),
            },
            Some(ToolChoice::Named { kind, function }) => {
                Invalid::unless(kind == "function", "tool_choice.type", "function")?;
                tools.retain(|tool| tool.name == function.name);
                if tools.is_empty() {
                    let message = format!("{:?} is none of the tools", function.name);
                    return Err(Invalid::new("tool_choice.function.name", message));
                }
                true
            }
        };
        let parallel = parallel.unwrap_or(true) && !matches!(choice, Some(ToolChoice::Named { .. }));
        Ok(Some(ToolUse { shown: specs.iter().map(ToolSpec::to_template).collect(), tools, required, parallel }))
    }

    /// The field of the request that has a tool's parameters.
    pub fn param(&self, tool: &Tool) -> String {
        let index =
            self.shown.as_array().and_then(|all| all.iter().position(|one| one["function"]["name"] == tool.name));
        index.map_or_else(|| "tools".to_owned(), |index| format!("tools[{index}].function.parameters"))
    }
}

fn checked(specs: &[ToolSpec]) -> Result<Vec<Tool>, Invalid> {
    if specs.len() > TOOLS_MAX {
        return Err(Invalid::new("tools", format!("there are {}; at most {TOOLS_MAX} may be", specs.len())));
    }
    let mut tools: Vec<Tool> = Vec::with_capacity(specs.len());
    for (index, spec) in specs.iter().enumerate() {
        let param = |field: &str| format!("tools[{index}].{field}");
        let name = &spec.function.name;
        Invalid::unless(spec.kind == "function", &param("type"), "function")?;
        Invalid::unless(is_name(name), &param("function.name"), NAME)?;
        if tools.iter().any(|tool| tool.name == *name) {
            return Err(Invalid::new(param("function.name"), format!("{name:?} is there twice")));
        }
        let none = || json!({"type": "object", "properties": {}, "additionalProperties": false});
        let parameters = spec.function.parameters.clone().unwrap_or_else(none);
        let kind = parameters.get("type");
        if !parameters.is_object() || kind.is_some_and(|kind| kind != "object") {
            return Err(Invalid::new(param("function.parameters"), "expected the JSON schema of an object"));
        }
        tools.push(Tool { name: name.clone(), parameters });
    }
    Ok(tools)
}

/// What [`is_name`] takes.
const NAME: &str = "1 to 64 letters, digits, `_` or `-`";

fn is_name(text: &str) -> bool {
    let plain = |letter: char| letter.is_ascii_alphanumeric() || letter == '_' || letter == '-';
    !text.is_empty() && text.len() <= NAME_MAX && text.chars().all(plain)
}

impl ToolSpec {
    fn to_template(&self) -> Value {
        let mut function = Map::new();
        function.insert("name".into(), self.function.name.clone().into());
        // Templates ask for both.
        function.insert("description".into(), self.function.description.clone().unwrap_or_default().into());
        let none = || json!({"type": "object", "properties": {}});
        function.insert("parameters".into(), self.function.parameters.clone().unwrap_or_else(none));
        json!({"type": "function", "function": function})
    }
}

/// A call that a model asks for, in a message of an assistant.
#[derive(Clone, Debug, Deserialize, Serialize, PartialEq, Eq, ToSchema)]
pub struct ToolCall {
    /// Its name, which the message with its result repeats.
    pub id: String,
    /// `function`
    #[serde(rename = "type", default = "function")]
    pub kind: String,
    /// What is called.
    pub function: FunctionCall,
}

fn function() -> String {
    "function".into()
}

/// What is called.
#[derive(Clone, Debug, Deserialize, Serialize, PartialEq, Eq, ToSchema)]
pub struct FunctionCall {
    /// The function.
    pub name: String,
    /// Its arguments: JSON, as the model wrote it.
    pub arguments: String,
}

impl ToolCall {
    /// A call with no arguments yet and an id of its own.
    pub fn begun(name: String, id: String) -> ToolCall {
        ToolCall { id, kind: function(), function: FunctionCall { name, arguments: String::new() } }
    }

    /// As chat templates take it: with arguments as what they are. `param` is what it is called in the request.
    ///
    /// # Errors
    /// Names the field that cannot be.
    pub fn to_template(&self, param: &str) -> Result<Value, Invalid> {
        Invalid::unless(self.kind == "function", &format!("{param}.type"), "function")?;
        Invalid::unless(is_name(&self.function.name), &format!("{param}.function.name"), NAME)?;
        let text = || Value::from(self.function.arguments.as_str());
        let arguments = serde_json::from_str::<Value>(&self.function.arguments).ok().filter(Value::is_object);
        let arguments = arguments.unwrap_or_else(text);
        Ok(json!({"id": self.id, "type": self.kind, "function": {"name": self.function.name, "arguments": arguments}}))
    }
}

/// The ids of an answer's calls: the same ones whenever it is told.
#[derive(Clone, Debug)]
pub struct CallIds(blake3::Hasher);

impl CallIds {
    /// Of an answer, by the name of all that was answered together and its place among it.
    pub fn new(name: &str, index: usize) -> CallIds {
        let mut hasher = blake3::Hasher::new();
        hasher.update(name.as_bytes()).update(&(index as u64).to_le_bytes());
        CallIds(hasher)
    }

    /// Of an answer without a name: others every time.
    pub fn any() -> CallIds {
        static ANSWERS: AtomicU64 = AtomicU64::new(0);
        let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_nanos());
        CallIds::new(&format!("{now} {}", ANSWERS.fetch_add(1, Ordering::Relaxed)), 0)
    }

    /// Of one of its calls.
    pub fn of(&self, call: usize, format: ToolFormat) -> String {
        let hash = self.0.clone().update(&(call as u64).to_le_bytes()).finalize().to_hex();
        // Mistral's templates take ids of nine letters and digits only.
        match format {
            ToolFormat::Mistral => hash[..9].to_owned(),
            ToolFormat::Hermes | ToolFormat::Llama => format!("call_{}", &hash[..24]),
        }
    }
}

/// A whole answer: its text without calls, the calls, and why it ended.
pub fn read(
    text: &str,
    format: ToolFormat,
    reason: FinishReason,
    ids: &CallIds,
) -> (String, Vec<ToolCall>, &'static str) {
    let mut parser = ToolParser::new(format);
    let mut pieces = parser.push(text);
    pieces.extend(parser.finish());
    let (mut text, mut calls) = (String::new(), Vec::<ToolCall>::new());
    for piece in pieces {
        match piece {
            Piece::Text(more) => text.push_str(&more),
            Piece::Call { index, name } => calls.push(ToolCall::begun(name, ids.of(index, format))),
            Piece::Arguments { index, text } => calls[index].function.arguments.push_str(&text),
        }
    }
    (text, calls, finish_reason(&parser, reason))
}

/// Why an answer ended, as OpenAI's API says it where tools could be called.
pub fn finish_reason(parser: &ToolParser, reason: FinishReason) -> &'static str {
    match reason {
        FinishReason::Stop if parser.has_called() => "tool_calls",
        reason => reason.name(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn wish(json: &str) -> Result<Option<ToolUse>, Invalid> {
        #[derive(Deserialize)]
        struct Wish {
            tools: Option<Vec<ToolSpec>>,
            tool_choice: Option<ToolChoice>,
            parallel_tool_calls: Option<bool>,
        }
        let wish: Wish = serde_json::from_str(json).expect(json);
        ToolUse::new(wish.tools.as_deref(), wish.tool_choice.as_ref(), wish.parallel_tool_calls)
    }

    const F: &str = r#"{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}"#;
    const G: &str = r#"{"type": "function", "function": {"name": "g", "description": "does g"}}"#;

    #[test]
    fn a_choice_of_tools_is_understood() {
        let found = |choice: &str| {
            let found = wish(&format!(r#"{{"tools": [{F}, {G}]{choice}}}"#)).unwrap();
            found.map(|tools| (tools.tools.len(), tools.required, tools.parallel))
        };
        assert_eq!(found(""), Some((2, false, true)));
        assert_eq!(found(r#", "tool_choice": "auto", "parallel_tool_calls": false"#), Some((2, false, false)));
        assert_eq!(found(r#", "tool_choice": "required""#), Some((2, true, true)));
        assert_eq!(found(r#", "tool_choice": "none""#), None);
        let named = r#", "tool_choice": {"type": "function", "function": {"name": "g"}}"#;
        assert_eq!(found(named), Some((1, true, false)));
        assert_eq!(wish("{}").unwrap(), None);
        assert_eq!(wish(r#"{"tools": []}"#).unwrap(), None);
    }

    #[test]
    fn what_cannot_be_is_named() {
        let check = |json: &str, param: &str| assert_eq!(wish(json).expect_err(json).param, param);
        check(r#"{"tool_choice": "required"}"#, "tool_choice");
        check(&format!(r#"{{"tools": [{F}], "tool_choice": "any"}}"#), "tool_choice");
        let named = r#"{"type": "function", "function": {"name": "h"}}"#;
        check(&format!(r#"{{"tools": [{F}], "tool_choice": {named}}}"#), "tool_choice.function.name");
        check(&format!(r#"{{"tools": [{G}, {F}, {F}]}}"#), "tools[2].function.name");
        check(r#"{"tools": [{"type": "retrieval", "function": {"name": "f"}}]}"#, "tools[0].type");
        check(r#"{"tools": [{"type": "function", "function": {"name": "f g"}}]}"#, "tools[0].function.name");
        let parameters =
            r#"{"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "array"}}}]}"#;
        check(parameters, "tools[0].function.parameters");
        let many: Vec<String> = (0..129).map(|i| F.replace("\"f\"", &format!("\"f{i}\""))).collect();
        check(&format!(r#"{{"tools": [{}]}}"#, many.join(",")), "tools");
    }

    #[test]
    fn calls_of_an_answer_have_ids_of_their_own() {
        let one = r#"<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>"#;
        let (text, calls, reason) =
            read(&format!("So.{one}\n{one}"), ToolFormat::Hermes, FinishReason::Stop, &CallIds::any());
        assert_eq!((text.as_str(), calls.len(), reason), ("So.", 2, "tool_calls"));
        assert_ne!(calls[0].id, calls[1].id);
        assert_eq!(calls[0].to_template("").unwrap()["function"]["arguments"], json!({"a": 1}));
        let text = r#"[TOOL_CALLS] [{"name": "f", "arguments": {}}]"#;
        let (_, calls, _) = read(text, ToolFormat::Mistral, FinishReason::Stop, &CallIds::any());
        assert!(calls[0].id.len() == 9 && calls[0].id.chars().all(|c| c.is_ascii_alphanumeric()));
    }

    #[test]
    fn a_call_that_is_cut_off_is_not_to_be_made() {
        let whole = r#"<tool_call>{"name": "f", "arguments": {"a": 1}"#;
        let reason = |text: &str, reason| read(text, ToolFormat::Hermes, reason, &CallIds::any()).2;
        assert_eq!(reason(whole, FinishReason::Stop), "tool_calls");
        assert_eq!(reason(&whole[..whole.len() - 1], FinishReason::Stop), "stop");
        assert_eq!(reason(whole, FinishReason::Length), "length");
        assert_eq!(reason("Hello.", FinishReason::Stop), "stop");
    }
}
