//! The grammar of answers that may or must call tools, in Lark's syntax.

use serde_json::{Value, json};

use super::{Tool, ToolFormat};
use crate::constraint::{ConstraintError, bounded};

/// What an answer may be.
#[derive(Clone, Debug, PartialEq)]
pub struct Allowed<'a> {
    /// The tools.
    pub tools: &'a [Tool],
    /// Whether one must be called.
    pub required: bool,
    /// Whether several may be.
    pub parallel: bool,
    /// Where none need be called: JSON Schema of an answer that calls none; without one, any text.
    pub otherwise: Option<&'a Value>,
}

/// Answers that call tools as `format` has it, with arguments as their schemas say. `special`: the id of a marker that is
/// one special token.
///
/// # Errors
/// [`ConstraintError::Invalid`] where a tool's parameters are no schema of an object.
pub fn grammar(
    format: ToolFormat,
    allowed: &Allowed<'_>,
    special: &dyn Fn(&str) -> Option<u32>,
) -> Result<String, ConstraintError> {
    let mut lark = String::new();
    let mut names = Vec::new();
    for (i, tool) in allowed.tools.iter().enumerate() {
        let head = format!("{{\"name\": {}, \"{}\": ", json!(tool.name), format.arguments_key());
        let parameters = bounded(&object(tool)?)?;
        lark.push_str(&format!("call_{i}: {} %json {parameters} \"}}\"\n", json!(head)));
        names.push(format!("call_{i}"));
    }
    lark.push_str(&format!("call: {}\n", names.join(" | ")));
    lark.push_str("TEXT: /(\\n|.)*/\n");
    let marker = |text: &str| special(text).map_or_else(|| json!(text).to_string(), |id| format!("<[{id}]>"));
    let begun = |text: &str| match special(text) {
        Some(id) => format!("begun: TEXT <[{id}]>\n"),
        None => format!("begun[lazy]: TEXT {}\n", json!(text)),
    };
    let (one, several) = match format {
        ToolFormat::Hermes => {
            let (open, close) = (marker("<tool_call>"), marker("</tool_call>"));
            lark.push_str(&format!("rest: \"\\n\" call \"\\n\" {close}\nwhole: {open} rest\n"));
            lark.push_str(&begun("<tool_call>"));
            ("rest", "rest (\"\\n\" whole)*")
        }
        ToolFormat::Mistral => {
            lark.push_str("one: \"[\" call \"]\"\nlist: \" \"? \"[\" call (\",\" \" \"? call)* \"]\"\n");
            lark.push_str(&format!("whole: {} list\n", marker("[TOOL_CALLS]")));
            lark.push_str(&begun("[TOOL_CALLS]"));
            ("\" \"? one", "list")
        }
        // One call is all that its templates take.
        ToolFormat::Llama => ("call", "call"),
    };
    let calls = if allowed.parallel { several } else { one };
    let opened = format.markers().map_or(calls.to_owned(), |(open, _)| format!("{} {calls}", marker(open)));
    let start = match (allowed.required, allowed.otherwise, format) {
        (true, ..) => opened,
        (false, Some(schema), _) => format!("{opened} | %json {}", bounded(schema)?),
        (false, None, ToolFormat::Llama) => {
            lark.push_str("ANSWER: /[^{](\\n|.)*/\n");
            format!("({calls} | ANSWER)?")
        }
        // Calls may follow each other with text between them.
        (false, None, ToolFormat::Hermes) if allowed.parallel => "(begun rest)* tail\ntail: TEXT".to_owned(),
        (false, None, _) => format!("begun {calls} | tail\ntail: TEXT"),
    };
    Ok(format!("start: {start}\n{lark}"))
}

/// A tool's schema, which is that of an object.
fn object(tool: &Tool) -> Result<Value, ConstraintError> {
    let mut schema = tool.parameters.clone();
    match schema.as_object_mut() {
        Some(map) if map.get("type").is_none_or(|kind| kind == "object") => {
            map.insert("type".into(), "object".into());
            Ok(schema)
        }
        _ => Err(ConstraintError::Invalid {
            what: "the JSON schema",
            message: format!("parameters of {:?} are not those of an object", tool.name),
        }),
    }
}
