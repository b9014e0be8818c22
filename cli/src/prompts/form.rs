//! What an answer must look like, as a request says it.

use pp_engine::constraint::{Constraint, ConstraintError, Grammar, Grammars};
use pp_engine::tools::{Allowed, ToolFormat, grammar};
use serde_json::Value;

use super::Prompts;
use crate::requests::choosing::Invalid;
use crate::requests::format::{self, ResponseFormat};
use crate::requests::tools::ToolUse;

/// What an answer must look like, and how it is read.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Form {
    /// Of the whole answer.
    grammar: Option<Grammar>,
    /// What of the request the grammar is made of.
    param: String,
    /// With tools: the schema of answers that call none.
    otherwise: Option<Value>,
    /// Special tokens that are part of the text.
    pub shown_specials: Vec<u32>,
    /// How calls of tools are written; without it there are none.
    pub tools: Option<ToolFormat>,
}

impl Form {
    /// A grammar of whole answers, of the field that says so.
    pub fn of_grammar(grammar: Option<Grammar>, param: impl Into<String>) -> Form {
        Form { grammar, param: param.into(), ..Form::default() }
    }

    /// The field that says what answers must look like.
    pub fn param(&self) -> &str {
        &self.param
    }
}

impl Prompts {
    /// What an answer must look like.
    ///
    /// # Errors
    /// Names the field that cannot be.
    pub fn form(&self, format: Option<&ResponseFormat>, tools: Option<&ToolUse>) -> Result<Form, Invalid> {
        let Some(tools) = tools else {
            let grammar = format.map(ResponseFormat::grammar).transpose()?.flatten();
            let param = grammar.as_ref().map_or("response_format", format::param);
            return Ok(Form::of_grammar(grammar, param));
        };
        let otherwise = format.map(ResponseFormat::schema).transpose()?.flatten();
        if tools.required && otherwise.is_some() {
            let message = "goes with tools that must be called only where it is text: calls have a form of their own";
            return Err(Invalid::new("response_format", message));
        }
        let special = |text: &str| self.tokenizer.id_of(text).filter(|id| self.tokenizer.is_special(*id));
        let allowed = Allowed {
            tools: &tools.tools,
            required: tools.required,
            parallel: tools.parallel,
            otherwise: otherwise.as_ref(),
        };
        let lark = grammar(self.tool_format, &allowed, &special);
        let lark = lark.map_err(|error| Invalid::new("tools", error.to_string()))?;
        Ok(Form {
            grammar: Some(Grammar::Made(lark)),
            param: "tools".into(),
            otherwise,
            shown_specials: self.tool_format.marker_texts().filter_map(special).collect(),
            tools: Some(self.tool_format),
        })
    }

    /// The constraint of a form, compiled: some milliseconds, and once some 100.
    ///
    /// # Errors
    /// Names the field whose grammar or schema is at fault.
    pub fn constraint(&self, form: &Form, tools: Option<&ToolUse>) -> Result<Option<Constraint>, Invalid> {
        let Some(grammar) = &form.grammar else { return Ok(None) };
        let grammars = self.grammars.get_or_init(|| Grammars::new(self.tokenizer.clone(), self.vocab));
        let grammars = grammars.as_ref().map_err(|error| Invalid::new(form.param.as_str(), error.to_string()))?;
        let compiled = grammars.compile(grammar).map(Some);
        compiled.map_err(|error| form.at_fault(grammars, tools, &error))
    }
}

impl Form {
    /// Which field does not compile, if one of those that the grammar is made of does not.
    fn at_fault(&self, grammars: &Grammars, tools: Option<&ToolUse>, error: &ConstraintError) -> Invalid {
        let own =
            tools.into_iter().flat_map(|tools| tools.tools.iter().map(|tool| (tools.param(tool), &tool.parameters)));
        let format = self.otherwise.iter().map(|schema| ("response_format.json_schema.schema".to_owned(), schema));
        let mut alone =
            own.chain(format).map(|(param, schema)| (param, grammars.compile(&Grammar::JsonSchema(schema.clone()))));
        match alone.find_map(|(param, compiled)| Some((param, compiled.err()?))) {
            Some((param, error)) => Invalid::new(param, error.to_string()),
            None => Invalid::new(self.param.as_str(), error.to_string()),
        }
    }
}
