//! Exit codes, and which error means which.

use std::io;

use pp_engine::backend::gpu::adapter::AdapterError;
use pp_engine::chat_template::ChatTemplateError;
use pp_engine::checkpoint::CheckpointError;
use pp_engine::cluster::remote::LeaseError;
use pp_engine::head::HeadError;
use pp_engine::layout::LayoutError;
use pp_engine::pipeline::PipelineError;
use pp_engine::split::SplitError;
use pp_engine::tokenizer::TokenizerError;
use pp_engine::weights::LoadError;
use pp_engine::worker::WorkerError;
use pp_transport::quic::joining::JoinError;

/// How the program ends; `--help` documents the numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Exit {
    /// Failed while running.
    Failure = 1,
    /// Bad usage or bad input.
    Usage = 2,
    /// No usable device, or not enough memory on it.
    Device = 3,
    /// The model cannot be read or is not supported.
    Model = 4,
    /// A worker is busy, not there, or does not do what it should.
    Worker = 5,
    /// `doctor` has found what will not go well for long.
    Warnings = 6,
    /// Ctrl-C.
    Cancelled = 130,
    /// The reader of stdout went away: as a shell reports SIGPIPE. Nothing is printed.
    Pipe = 141,
}

/// An error of this crate's own; the text says it all.
#[derive(Debug, thiserror::Error)]
#[error("{message}")]
pub struct Refusal {
    exit: Exit,
    message: String,
}

/// Bad usage or input.
pub fn usage(message: impl Into<String>) -> anyhow::Error {
    Refusal { exit: Exit::Usage, message: message.into() }.into()
}

/// No device, or too little memory.
pub fn device(message: impl Into<String>) -> anyhow::Error {
    Refusal { exit: Exit::Device, message: message.into() }.into()
}

/// A model that is not there or not supported.
pub fn model(message: impl Into<String>) -> anyhow::Error {
    Refusal { exit: Exit::Model, message: message.into() }.into()
}

/// A worker that is not to be had.
pub fn worker(message: impl Into<String>) -> anyhow::Error {
    Refusal { exit: Exit::Worker, message: message.into() }.into()
}

/// An error of that kind.
pub fn refusal(exit: Exit, message: impl Into<String>) -> anyhow::Error {
    Refusal { exit, message: message.into() }.into()
}

/// The user wanted it to end.
pub fn cancelled() -> anyhow::Error {
    Refusal { exit: Exit::Cancelled, message: "cancelled".to_owned() }.into()
}

/// What an error means for the exit code: the outermost cause that is known decides.
pub fn exit_of(error: &anyhow::Error) -> Exit {
    error.chain().find_map(known).unwrap_or(Exit::Failure)
}

fn known(error: &(dyn std::error::Error + 'static)) -> Option<Exit> {
    if let Some(refusal) = error.downcast_ref::<Refusal>() {
        return Some(refusal.exit);
    }
    if let Some(error) = error.downcast_ref::<HeadError>() {
        return Some(match error {
            HeadError::Pipeline(error) => of_pipeline(error),
            HeadError::Refused(_) | HeadError::NoSuchToken { .. } => Exit::Usage,
            HeadError::Down { .. } | HeadError::Stuck { .. } => Exit::Failure,
        });
    }
    if let Some(error) = error.downcast_ref::<PipelineError>() {
        return Some(of_pipeline(error));
    }
    if let Some(error) = error.downcast_ref::<AdapterError>() {
        return Some(if matches!(error, AdapterError::None) { Exit::Device } else { Exit::Usage });
    }
    if let Some(error) = error.downcast_ref::<TokenizerError>() {
        return Some(if matches!(error, TokenizerError::Encode { .. }) { Exit::Usage } else { Exit::Model });
    }
    if let Some(error) = error.downcast_ref::<LayoutError>() {
        return Some(of_layout(error));
    }
    if let Some(error) = error.downcast_ref::<ChatTemplateError>() {
        let refused = matches!(error, ChatTemplateError::Refused { .. } | ChatTemplateError::Role { .. });
        return Some(if refused { Exit::Usage } else { Exit::Model });
    }
    if error.is::<LeaseError>() || error.is::<JoinError>() {
        return Some(Exit::Worker);
    }
    if error.is::<CheckpointError>() {
        return Some(Exit::Model);
    }
    if error.is::<SplitError>() {
        return Some(Exit::Usage);
    }
    let io = error.downcast_ref::<io::Error>()?;
    Some(if io.kind() == io::ErrorKind::BrokenPipe { Exit::Pipe } else { Exit::Failure })
}

fn of_pipeline(error: &PipelineError) -> Exit {
    match error {
        PipelineError::Cancelled => Exit::Cancelled,
        PipelineError::Layout { error, .. } => of_layout(error),
        // Only workers refuse: they run another program, or cannot get the model.
        PipelineError::Load {
            error: LoadError::Refused { .. } | LoadError::NoRoom { .. } | LoadError::Weights { .. },
            ..
        }
        | PipelineError::Manifest(_) => Exit::Worker,
        error if error.is_out_of_memory() => Exit::Device,
        _ => Exit::Failure,
    }
}

fn of_layout(error: &LayoutError) -> Exit {
    match error {
        LayoutError::Binding { .. } | LayoutError::KvBinding { .. } => Exit::Device,
        LayoutError::Frame { .. } | LayoutError::Work { .. } => Exit::Usage,
        _ => Exit::Model,
    }
}

/// What to do about an error whose own text does not say so.
pub fn advice(error: &anyhow::Error) -> Option<&'static str> {
    let pipeline = error.chain().find_map(|cause| match cause.downcast_ref::<HeadError>() {
        Some(HeadError::Pipeline(error)) => Some(error),
        _ => cause.downcast_ref::<PipelineError>(),
    })?;
    match pipeline {
        error if error.is_out_of_memory() => {
            Some("use a smaller --ctx, more --stages, another --split, or a model of fewer bits (see `pp-run plan`)")
        }
        PipelineError::Load { error: LoadError::Refused { .. } | LoadError::Weights { .. }, .. } => None,
        PipelineError::Stage { error: WorkerError::Lost { .. } | WorkerError::Gone { .. }, .. } => {
            Some("see `pp-run cluster status`, and what the worker itself says")
        }
        PipelineError::Load { .. } => Some("see `pp-run devices`; another --device may work"),
        PipelineError::Stage { .. } | PipelineError::Wedged { .. } | PipelineError::Silent { .. } => {
            Some("try again; if it stays, choose another --device, and look at the driver's messages (dmesg)")
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use pp_engine::pipeline::StageName;
    use pp_engine::schedule::Refused;

    use super::*;

    #[test]
    fn every_kind_of_error_has_its_exit_code() {
        let check = |error: anyhow::Error, exit| assert_eq!(exit_of(&error), exit, "{error}");
        check(usage("x"), Exit::Usage);
        check(device("x").context("while opening"), Exit::Device);
        check(HeadError::from(Refused::EmptyPrompt).into(), Exit::Usage);
        check(PipelineError::Cancelled.into(), Exit::Cancelled);
        check(worker("x"), Exit::Worker);
        check(LeaseError::Draining { worker: "rig2".to_owned() }.into(), Exit::Worker);
        let stage = StageName { index: 0, layers: (0, 2), device: "x".into(), worker: None };
        let refused = LoadError::Refused { message: "no such model".to_owned() };
        check(PipelineError::Load { stage: stage.clone(), error: refused }.into(), Exit::Worker);
        let lost = LoadError::Weights { message: "nobody has it".to_owned() };
        check(PipelineError::Load { stage: stage.clone(), error: lost }.into(), Exit::Worker);
        check(HeadError::Pipeline(PipelineError::Silent { stage, seconds: 1 }).into(), Exit::Failure);
        check(AdapterError::None.into(), Exit::Device);
        check(AdapterError::NoMatch { selector: "x".into(), known: String::new() }.into(), Exit::Usage);
        check(SplitError::NoStages.into(), Exit::Usage);
        check(io::Error::from(io::ErrorKind::BrokenPipe).into(), Exit::Pipe);
        check(io::Error::from(io::ErrorKind::StorageFull).into(), Exit::Failure);
        check(anyhow::anyhow!("anything"), Exit::Failure);
    }
}
