//! What an answer must look like, from a request to a constraint.

use std::sync::Arc;

use pp_engine::constraint::Constraint;
use tokio::sync::Semaphore;

use super::Shared;
use super::errors::ApiError;
use crate::prompts::{Form, Prompts};
use crate::requests::choosing::Invalid;
use crate::requests::format::ResponseFormat;
use crate::requests::tools::{ToolChoice, ToolSpec, ToolUse};

/// Grammars that are compiled at once. Each takes a processor, mostly for a millisecond, within the compiler's bounds for
/// longer; others wait.
const AT_ONCE: usize = 2;

/// Lets a few grammars be compiled at once.
pub struct Compiling(Arc<Semaphore>);

impl Compiling {
    pub fn new() -> Compiling {
        Compiling(Arc::new(Semaphore::new(AT_ONCE)))
    }
}

/// What a request says of the form of answers.
pub struct WantedForm {
    pub format: Option<ResponseFormat>,
    pub tools: Option<Vec<ToolSpec>>,
    pub choice: Option<ToolChoice>,
    pub parallel: Option<bool>,
}

/// What answers must look like.
#[derive(Debug, Default)]
pub struct Formed {
    pub form: Form,
    pub tools: Option<ToolUse>,
    pub constraint: Option<Constraint>,
}

impl WantedForm {
    /// Compiles it where it keeps nobody waiting.
    ///
    /// # Errors
    /// Names the field that cannot be.
    pub async fn compile(self, state: &Shared) -> Result<Formed, ApiError> {
        if self.format.is_none() && self.tools.is_none() && self.choice.is_none() {
            return Ok(Formed::default());
        }
        let place = state.compiling.0.clone().acquire_owned().await;
        let state = state.clone();
        let compiled = tokio::task::spawn_blocking(move || {
            let formed = self.formed(&state.prompts);
            // Also where nobody waits for it any more, it took a processor until now.
            drop(place);
            formed
        });
        let formed = compiled.await.map_err(|error| ApiError::internal(format!("a grammar: {error}")))?;
        Ok(formed?)
    }

    fn formed(self, prompts: &Prompts) -> Result<Formed, Invalid> {
        let tools = ToolUse::new(self.tools.as_deref(), self.choice.as_ref(), self.parallel)?;
        let form = prompts.form(self.format.as_ref(), tools.as_ref())?;
        let constraint = prompts.constraint(&form, tools.as_ref())?;
        Ok(Formed { form, tools, constraint })
    }
}
