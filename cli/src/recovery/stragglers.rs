//! Stages that take much longer than they used to: told when that begins and when it is over.

use pp_engine::head::{Head, Slow};
use serde::Serialize;

use crate::output::Out;

/// A stage that took much longer than it used to, for reports.
#[derive(Clone, Debug, Serialize)]
pub struct Straggler {
    /// Which.
    pub stage: usize,
    /// Where it is; null: here.
    pub worker: Option<String>,
    pub device: String,
    /// First layer and the one after the last.
    pub layers: [usize; 2],
    /// How many times what it used to take, …
    pub times: f64,
    /// … for how many micro-batches.
    pub steps: usize,
    /// Whether it takes what it used to again.
    pub is_over: bool,
}

/// See above.
pub struct Stragglers {
    happened: Vec<Straggler>,
    /// The latest of `happened` that are not over, of the pipeline that runs.
    now: Vec<usize>,
    replaces: bool,
    out: Out,
}

impl Stragglers {
    /// `replaces`: others take their layers.
    pub fn new(replaces: bool, out: &Out) -> Stragglers {
        Stragglers { happened: Vec::new(), now: Vec::new(), replaces, out: *out }
    }

    /// What has happened so far.
    pub fn happened(&self) -> &[Straggler] {
        &self.happened
    }

    /// Tells what is new.
    pub fn look(&mut self, head: &Head) {
        let slow = head.stragglers();
        for index in std::mem::take(&mut self.now) {
            let known = &mut self.happened[index];
            if let Some(slow) = slow.iter().find(|slow| slow.stage.index == known.stage) {
                (known.times, known.steps) = (slow.times, slow.steps);
                self.now.push(index);
            } else {
                known.is_over = true;
                let name = head.pipeline().stages().get(known.stage).map(ToString::to_string);
                self.out.note(&format!("{} takes what it used to again", name.unwrap_or_default()));
            }
        }
        for Slow { stage, times, steps } in slow {
            if self.now.iter().any(|index| self.happened[*index].stage == stage.index) {
                continue;
            }
            let what = if stage.worker.is_none() {
                String::new()
            } else if self.replaces {
                "; another one takes its layers, if there is one that can".to_owned()
            } else {
                "; --replace-stragglers would give its layers to another one".to_owned()
            };
            self.out.note(&format!(
                "{}: is its device hot, or busy with something else?{what}",
                Slow { stage: stage.clone(), times, steps }
            ));
            self.now.push(self.happened.len());
            self.happened.push(Straggler {
                stage: stage.index,
                worker: stage.worker.map(|worker| worker.to_string()),
                device: stage.device.to_string(),
                layers: [stage.layers.0, stage.layers.1],
                times,
                steps,
                is_over: false,
            });
        }
    }

    /// Another pipeline runs: how the stages of the one before do nobody will know.
    pub fn forget(&mut self) {
        self.now.clear();
    }
}
