//! A model and its pipeline, as long as a conversation lasts: opened when they are wanted, and again when they failed.

use std::path::Path;
use std::sync::Arc;

use anyhow::Result;
use pp_engine::checkpoint::Checkpoint;
use pp_engine::head::{Answer, Event, Head, HeadError, Request};

use crate::args::{ModelArgs, PipelineArgs};
use crate::command::{self, run};
use crate::output::Out;
use crate::output::live::Live;
use crate::plan::{self, Wanted};
use crate::prompts::Prompts;
use crate::recovery::{Recovered, Recovery};
use crate::report::{self, StageRow, stage_table};

/// A model that has been opened: its files' directory, its tokenizer and its template.
pub struct Model {
    /// What there is of it on disk.
    pub checkpoint: Arc<Checkpoint>,
    /// From text to ids.
    pub prompts: Prompts,
}

impl Model {
    fn open(args: &ModelArgs, template: Option<(String, String)>) -> Result<Model> {
        let checkpoint = command::open(args)?;
        let prompts = Prompts::new(&checkpoint, template)?;
        prompts.template()?;
        Ok(Model { checkpoint, prompts })
    }

    /// For people.
    pub fn name(&self) -> String {
        self.checkpoint.path.file_name().unwrap_or_default().to_string_lossy().into_owned()
    }
}

/// A pipeline that runs.
struct Running {
    head: Head,
    recovery: Recovery,
    load_seconds: f64,
    /// Seconds that it has been asked something.
    asked_seconds: f64,
    /// Recoveries before it was asked for the latest answer.
    recovered_before: usize,
}

/// See above.
pub struct Session {
    model: Model,
    pipeline: PipelineArgs,
    template: Option<(String, String)>,
    running: Option<Running>,
    out: Out,
}

impl Session {
    /// With a model whose pipeline runs.
    ///
    /// # Errors
    /// When either does not open.
    pub fn open(
        model: &ModelArgs,
        template: Option<(String, String)>,
        pipeline: PipelineArgs,
        out: Out,
    ) -> Result<Session> {
        let model = Model::open(model, template.clone())?;
        let mut session = Session { model, pipeline, template, running: None, out };
        session.running()?;
        Ok(session)
    }

    /// The model.
    pub fn model(&self) -> &Model {
        &self.model
    }

    /// Goes on with another model, over a pipeline that the same options ask for. Where that does not open, the model
    /// is the one before.
    ///
    /// # Errors
    /// When it is not there, or its pipeline does not open.
    pub fn switch(&mut self, name: &str) -> Result<()> {
        let model = Model::open(&ModelArgs { model: Some(name.to_owned()) }, self.template.clone())?;
        // Both may not fit the memory.
        self.running = None;
        let before = std::mem::replace(&mut self.model, model);
        if let Err(error) = self.running() {
            self.model = before;
            return Err(error);
        }
        Ok(())
    }

    /// Whether the pipeline has to be opened before anything can be asked.
    pub fn is_down(&self) -> bool {
        self.running.is_none()
    }

    /// The pipeline, opened where there is none.
    fn running(&mut self) -> Result<&mut Running> {
        if self.running.is_none() {
            let plan = plan::make(self.model.checkpoint.clone(), &self.pipeline, Wanted::one(None), &self.out)?;
            let options = command::head_options(&self.pipeline);
            let tokenizer = self.model.prompts.tokenizer().clone();
            let (recovery, head, load_seconds) = Recovery::load(plan, &self.pipeline, options, tokenizer, &self.out)?;
            self.running = Some(Running { head, recovery, load_seconds, asked_seconds: 0.0, recovered_before: 0 });
        }
        Ok(self.running.as_mut().expect("it was opened"))
    }

    /// Positions that a conversation can have.
    ///
    /// # Errors
    /// When the pipeline does not open.
    pub fn capacity(&mut self) -> Result<usize> {
        Ok(self.running()?.head.scheduler().limits().capacity())
    }

    /// The answer to a request; what there is so far when the user wants it to end. A pipeline that fails is let go.
    ///
    /// # Errors
    /// When it is refused, or the pipeline fails or does not open.
    pub fn ask(&mut self, request: Request, say: &mut dyn FnMut(Event)) -> Result<Answer> {
        let mut live = Live::new(false, &self.out);
        let running = self.running()?;
        running.recovered_before = running.recovery.happened().len();
        match run::answer(&mut running.head, request, &mut running.recovery, &mut live, say) {
            Ok(answer) => {
                running.asked_seconds += answer.timings.total_seconds;
                Ok(answer)
            }
            Err(error) => {
                let is_refused =
                    |error: &HeadError| matches!(error, HeadError::Refused(_) | HeadError::NoSuchToken { .. });
                if !error.downcast_ref().is_some_and(is_refused) {
                    self.running = None;
                }
                Err(error)
            }
        }
    }

    /// Recoveries while the latest answer was made.
    pub fn recovered(&self) -> Vec<Recovered> {
        let latest = |running: &Running| running.recovery.happened()[running.recovered_before..].to_vec();
        self.running.as_ref().map_or(Vec::new(), latest)
    }

    /// The stages, with what they have done so far; none where the pipeline is down.
    pub fn stages(&self) -> Vec<StageRow> {
        self.running.as_ref().map_or(Vec::new(), |running| report::stages(running.head.pipeline()))
    }

    /// The pipe, as a table, and what a single conversation makes of it.
    pub fn stages_text(&self) -> String {
        let Some(running) = &self.running else {
            return "the pipeline is down; the next message opens it again".to_owned();
        };
        let (stages, status) = (self.stages(), running.head.status());
        let capacity = running.head.scheduler().limits().capacity();
        let mut text = format!(
            "{}\nKV cache: {} of {} pages held or remembered; a conversation has up to {capacity} tokens; loaded in {:.2} s",
            stage_table(&stages, running.asked_seconds),
            status.held_pages + status.idle_pages,
            status.pages,
            running.load_seconds,
        );
        if let Some(single) = single_stream(stages.len()) {
            text.push_str(&format!("\n{single}"));
        }
        text
    }

    /// Writes what every stage did when.
    ///
    /// # Errors
    /// When the pipeline is down, or the file cannot be written.
    pub fn write_trace(&self, path: &Path) -> Result<()> {
        let running = self.running.as_ref();
        let running = running.ok_or_else(|| anyhow::anyhow!("the pipeline is down: it left no trace"))?;
        command::write_trace(&running.head.trace(), path)
    }
}

/// What a single conversation makes of a pipe of so many stages, where there is something to say.
pub fn single_stream(stages: usize) -> Option<String> {
    (stages > 1).then(|| {
        format!(
            "single-stream mode: one conversation fills 1/{stages} of the pipe, as each token goes through the stages one \
             after the other; prompts overlap"
        )
    })
}
