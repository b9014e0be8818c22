//! Calls of tools in an answer that is streamed.

use pp_engine::head::FinishReason;
use pp_engine::tools::{Piece, ToolFormat, ToolParser};
use serde::Serialize;
use utoipa::ToSchema;

use super::chat::Delta;
use super::logprobs::Placed;
use crate::requests::tools::{CallIds, ToolCall, finish_reason};

/// A piece of a call: the first has its id and the function's name, those that follow more of the arguments.
#[derive(Debug, Serialize, ToSchema)]
pub struct CallDelta {
    /// Which call of the answer.
    pub index: usize,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub id: Option<String>,
    /// `function`
    #[serde(rename = "type", skip_serializing_if = "Option::is_none")]
    pub kind: Option<String>,
    pub function: FunctionDelta,
}

/// A piece of what is called.
#[derive(Debug, Serialize, ToSchema)]
pub struct FunctionDelta {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// To be put behind what came before; JSON, once all have come.
    pub arguments: String,
}

/// One answer in which tools may be called.
pub struct Calling {
    format: ToolFormat,
    parser: ToolParser,
    ids: CallIds,
    /// Tokens of text that is held back.
    pub tokens: Vec<Placed>,
}

impl Calling {
    pub fn new(format: ToolFormat, ids: CallIds) -> Calling {
        Calling { format, parser: ToolParser::new(format), ids, tokens: Vec::new() }
    }

    /// More text; what has become certain.
    pub fn text(&mut self, text: &str) -> Vec<Delta> {
        let pieces = self.parser.push(text);
        self.deltas(pieces)
    }

    /// What was held back, and why the answer ended.
    pub fn end(&mut self, reason: FinishReason) -> (Vec<Delta>, &'static str) {
        let pieces = self.parser.finish();
        (self.deltas(pieces), finish_reason(&self.parser, reason))
    }

    fn deltas(&self, pieces: Vec<Piece>) -> Vec<Delta> {
        let delta = |piece| match piece {
            Piece::Text(text) => Delta::of_text(text),
            Piece::Call { index, name } => {
                let ToolCall { id, kind, function } = ToolCall::begun(name, self.ids.of(index, self.format));
                let function = FunctionDelta { name: Some(function.name), arguments: function.arguments };
                Delta::of_call(CallDelta { index, id: Some(id), kind: Some(kind), function })
            }
            Piece::Arguments { index, text } => {
                let function = FunctionDelta { name: None, arguments: text };
                Delta::of_call(CallDelta { index, id: None, kind: None, function })
            }
        };
        pieces.into_iter().map(delta).collect()
    }
}
