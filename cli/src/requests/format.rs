//! `response_format`: what an answer must look like.

use pp_engine::constraint::Grammar;
use serde::Deserialize;
use serde_json::{Value, json};
use utoipa::ToSchema;

use super::choosing::Invalid;

/// What an answer must look like.
#[derive(Clone, Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct ResponseFormat {
    /// What kind of text it is.
    #[serde(rename = "type")]
    pub kind: FormatKind,
    /// With `json_schema`: the schema.
    #[serde(default)]
    pub json_schema: Option<NamedSchema>,
    /// Ours, with `regex`: the expression that the whole answer matches, in the syntax of Rust's `regex`.
    #[serde(default)]
    pub pattern: Option<String>,
    /// Ours, with `grammar`: a context-free grammar, in llguidance's variant of Lark's syntax.
    #[serde(default)]
    pub grammar: Option<String>,
}

/// `type`; `regex` and `grammar` are ours.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum FormatKind {
    /// Anything.
    Text,
    /// A JSON object.
    JsonObject,
    /// JSON that a schema describes.
    JsonSchema,
    /// What a regular expression matches as a whole.
    Regex,
    /// A text of a context-free grammar.
    Grammar,
}

/// A schema, and what it is called.
#[derive(Clone, Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct NamedSchema {
    /// What it is called; nothing is made of it.
    #[expect(dead_code, reason = "taken and not used")]
    pub name: String,
    /// What it is for; nothing is made of it.
    #[serde(default)]
    #[expect(dead_code, reason = "taken and not used")]
    pub description: Option<String>,
    /// The JSON Schema; any object where there is none.
    #[serde(default)]
    #[schema(value_type = Option<Object>)]
    pub schema: Option<Value>,
    /// Answers keep to the schema, whatever this says.
    #[serde(default)]
    #[expect(dead_code, reason = "taken and not used")]
    pub strict: Option<bool>,
}

impl ResponseFormat {
    /// The grammar of answers; none where they may be anything.
    ///
    /// # Errors
    /// Names the field that is missing, or is that of another type.
    pub fn grammar(&self) -> Result<Option<Grammar>, Invalid> {
        let given = [
            ("json_schema", FormatKind::JsonSchema, self.json_schema.is_some()),
            ("pattern", FormatKind::Regex, self.pattern.is_some()),
            ("grammar", FormatKind::Grammar, self.grammar.is_some()),
        ];
        for (field, kind, is_given) in given {
            let param = format!("response_format.{field}");
            if is_given && kind != self.kind {
                return Err(Invalid::new(param, "does not go with this type"));
            }
            if !is_given && kind == self.kind {
                return Err(Invalid::new(param, "is missing"));
            }
        }
        Ok(match (&self.json_schema, &self.pattern, &self.grammar) {
            (Some(NamedSchema { schema: Some(schema), .. }), ..) => Some(Grammar::JsonSchema(schema.clone())),
            (_, Some(pattern), _) => Some(Grammar::Regex(pattern.clone())),
            (.., Some(grammar)) => Some(Grammar::Lark(grammar.clone())),
            _ => (self.kind != FormatKind::Text).then_some(Grammar::JsonObject),
        })
    }

    /// The schema of answers that are JSON: what they may be beside calls of tools.
    ///
    /// # Errors
    /// As [`ResponseFormat::grammar`], and where answers are of another kind.
    pub fn schema(&self) -> Result<Option<Value>, Invalid> {
        match self.grammar()? {
            None => Ok(None),
            Some(Grammar::JsonObject) => Ok(Some(json!({"type": "object"}))),
            Some(Grammar::JsonSchema(schema)) => Ok(Some(schema)),
            Some(_) => Err(Invalid::new("response_format.type", "with tools it is text, json_object or json_schema")),
        }
    }
}

/// The field of a request that an error of a grammar is in.
pub fn param(grammar: &Grammar) -> &'static str {
    match grammar {
        Grammar::JsonObject => "response_format",
        Grammar::JsonSchema(_) => "response_format.json_schema.schema",
        Grammar::Regex(_) => "response_format.pattern",
        Grammar::Lark(_) | Grammar::Made(_) => "response_format.grammar",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(json: &str) -> Result<Option<Grammar>, Invalid> {
        serde_json::from_str::<ResponseFormat>(json).expect(json).grammar()
    }

    #[test]
    fn every_type_has_its_grammar() {
        let check = |json: &str, grammar: Option<Grammar>| assert_eq!(read(json).expect(json), grammar);
        check(r#"{"type": "text"}"#, None);
        check(r#"{"type": "json_object"}"#, Some(Grammar::JsonObject));
        check(r#"{"type": "json_schema", "json_schema": {"name": "x", "strict": true}}"#, Some(Grammar::JsonObject));
        let schema = r#"{"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "null"}}}"#;
        check(schema, Some(Grammar::JsonSchema(json!({"type": "null"}))));
        check(r#"{"type": "regex", "pattern": "a+"}"#, Some(Grammar::Regex("a+".into())));
        check(r#"{"type": "grammar", "grammar": "start: \"a\""}"#, Some(Grammar::Lark("start: \"a\"".into())));
    }

    #[test]
    fn fields_of_other_types_and_missing_ones_are_named() {
        let check = |json: &str, param: &str| assert_eq!(read(json).expect_err(json).param, param);
        check(r#"{"type": "json_schema"}"#, "response_format.json_schema");
        check(r#"{"type": "regex", "grammar": "a"}"#, "response_format.pattern");
        check(r#"{"type": "json_object", "json_schema": {"name": "x"}}"#, "response_format.json_schema");
        check(r#"{"type": "text", "pattern": "a"}"#, "response_format.pattern");
        check(r#"{"type": "grammar"}"#, "response_format.grammar");
    }
}
