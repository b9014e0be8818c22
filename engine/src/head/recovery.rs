//! Another pipeline in the place of one that failed, and the answers go on.

use std::fmt;
use std::sync::Arc;

use super::{Event, FinishReason, Head};
use crate::layout::StageSpec;
use crate::pipeline::{Past, Pipeline, PipelineError, StageName, StageReport};
use crate::schedule::cost::{Costs, Held};
use crate::schedule::{Kept, Rebuild, RequestId, Straggler};
use crate::trace::HeadState;
use crate::wire::Wire;

/// A stage that takes much longer than it used to.
#[derive(Clone, Debug, PartialEq)]
pub struct Slow {
    /// Where it is.
    pub stage: StageName,
    /// How many times what it used to take, …
    pub times: f64,
    /// … for how many micro-batches.
    pub steps: usize,
}

impl fmt::Display for Slow {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Slow { stage, times, steps } = self;
        write!(f, "{stage} has taken {times:.1} times what it used to for {steps} micro-batches")
    }
}

/// A worker, and its device.
type Place = (Option<Arc<str>>, Arc<str>);

/// What was made of stragglers.
#[derive(Debug, Default)]
pub(super) struct Straggling {
    /// The one for which the pipeline was given up.
    blamed: Option<Place>,
    /// Those that nobody could take the place of: they stay where they are.
    endured: Vec<Place>,
}

fn place(stage: &StageName) -> Place {
    (stage.worker.clone(), stage.device.clone())
}

impl Head {
    /// Ends the pipeline, which has failed or is to be another one, and says what the one in its place needs to know. What
    /// was asked is kept, and more may be asked; nothing goes on until [`Head::recover`] or [`Head::fail`].
    pub fn suspend(&mut self) -> Past {
        if self.lost_at.is_none() {
            self.lost("the pipeline is being replaced".to_owned());
        }
        let past = self.pipeline.close();
        self.crossings.lost(self.in_flight.iter().any(|flight| flight.is_probe));
        self.in_flight.clear();
        self.unmeasured.clear();
        past
    }

    /// Whether what was asked is kept when the pipeline fails.
    pub fn recovers(&self) -> bool {
        self.options.recovers
    }

    /// Stages that take much longer than they used to.
    pub fn stragglers(&self) -> Vec<Slow> {
        let slow = |Straggler { stage, times, steps }: Straggler| {
            self.pipeline.stages().get(stage).map(|stage| Slow { stage: stage.clone(), times, steps })
        };
        self.scheduler.stragglers().into_iter().filter_map(slow).collect()
    }

    /// The worker's stage that is to go elsewhere as it takes too long.
    pub(super) fn straggles(&mut self) -> Option<PipelineError> {
        if !self.options.replaces_stragglers || !self.options.recovers {
            return None;
        }
        let goes = |slow: &Slow| slow.stage.worker.is_some() && !self.straggling.endured.contains(&place(&slow.stage));
        let Slow { stage, times, steps } = self.stragglers().into_iter().find(goes)?;
        self.straggling.blamed = Some(place(&stage));
        Some(PipelineError::Straggler { stage, times, steps })
    }

    /// Since when nothing is to be expected of the pipeline.
    pub(super) fn lost(&mut self, reason: String) {
        let now = self.recorder.now();
        let waits = self.pipeline.in_flight() > 0;
        let doing = if self.running.is_empty() { HeadState::Idle } else { HeadState::Working };
        self.recorder.state(doing, self.accounted, now);
        self.accounted = now;
        self.lost_at = Some(if waits { self.recorder.at(self.pipeline.heard()).min(now) } else { now });
        self.down = Some(reason);
    }

    /// Goes on with another pipeline in the place of the one that was suspended. What its stages do not have any more of
    /// the running sequences is computed again: what is returned, and [`Head::rebuild`] says how far that is. Tokens that
    /// were drawn stay as they are. Requests that the new pipeline has no room for end ([`FinishReason::Failed`]).
    ///
    /// # Panics
    /// When the pipeline before was not suspended.
    pub fn recover(&mut self, pipeline: Pipeline, say: &mut dyn FnMut(Event)) -> Rebuild {
        let lost_at = self.lost_at.take().expect("the pipeline before was suspended");
        let cut = |pipeline: &Pipeline| -> Vec<_> {
            pipeline.reports().iter().map(|report| report.spec.layers.clone()).collect()
        };
        // Where hops round rows, it matters where they are: keys and values of another cut are other ones.
        let has_pages = pipeline.limits().wire == Wire::F32 || cut(&pipeline) == cut(&self.pipeline);
        let kept = |report: &StageReport| Kept {
            layers: report.spec.layers.clone(),
            pages: if has_pages { report.kept.clone() } else { 0..0 },
            boundary: report.boundary.clone(),
        };
        let kept: Vec<Kept> = pipeline.reports().iter().map(kept).collect();
        let limits = self.options.limits(&pipeline);
        let devices = |pipeline: &Pipeline| {
            let device = |report: &StageReport| (report.spec.clone(), report.device.clone());
            pipeline.reports().iter().map(device).collect::<Vec<_>>()
        };
        let (before, now) = (devices(&self.pipeline), devices(&pipeline));
        self.recorder = pipeline.recorder().clone();
        self.accounted = self.recorder.now();
        self.recorder.outage(lost_at, self.accounted);
        if before != now {
            let elsewhere = |costs: &Costs| costs.elsewhere(&held(&before), &held(&now), pipeline.shares());
            self.scheduler.forget_costs(self.scheduler.costs().map(elsewhere));
        }
        let rebuild = self.scheduler.recover(limits, pipeline.shares().to_vec(), &kept);
        let blamed = self.straggling.blamed.take();
        self.straggling.endured.extend(blamed.filter(|blamed| pipeline.stages().iter().any(|s| place(s) == *blamed)));
        self.pipeline = pipeline;
        self.down = None;
        for request in self.scheduler.too_long() {
            self.end(request, FinishReason::Failed, say);
            self.scheduler.cancel(request);
        }
        rebuild
    }

    /// Seconds from when the pipeline that is down was last heard until that was noticed; nothing while one runs.
    pub fn noticed_after(&self) -> Option<f64> {
        self.lost_at.map(|since| self.accounted.saturating_sub(since) as f64 * 1e-9)
    }

    /// What the latest recovery computes again, and how far it is.
    pub fn rebuild(&self) -> Rebuild {
        self.scheduler.rebuild()
    }

    /// Ends everything that was asked: there will be no other pipeline for it.
    pub fn fail(&mut self, say: &mut dyn FnMut(Event)) {
        let running: Vec<RequestId> = self.running.keys().copied().collect();
        for request in running {
            self.end(request, FinishReason::Failed, say);
            self.scheduler.cancel(request);
        }
        self.in_flight.clear();
    }

    /// What there is to say while there is no pipeline: of requests whose deadline has passed, and of those that were
    /// complete when they were asked.
    pub fn meanwhile(&mut self, say: &mut dyn FnMut(Event)) {
        self.say_replayed(say);
        for request in self.scheduler.expire(self.recorder.now()) {
            self.end(request, FinishReason::Deadline, say);
        }
    }
}

/// Layers, and what they are on.
fn held(stages: &[(StageSpec, String)]) -> Vec<Held<'_>> {
    stages.iter().map(|(spec, device)| (spec.layers.clone(), device.as_str())).collect()
}
