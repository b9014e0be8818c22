//! `--cluster FILE`: workers, stages, split, wire and device by file. What was typed goes before it.

use std::path::Path;

use anyhow::Result;
use serde::Deserialize;

use super::places;
use crate::args::{PipelineArgs, WireArg};
use crate::errors::usage;

/// Longest file that is read.
const BYTES_MAX: u64 = 1 << 20;

/// The file.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
struct File {
    /// As `--workers`.
    workers: Vec<String>,
    /// As `--stages`.
    stages: Option<usize>,
    /// As `--split`.
    split: Option<String>,
    /// As `--wire`.
    wire: Option<WireArg>,
    /// As `--device`: of the stages that run here.
    device: Vec<String>,
}

/// The options with what the file says, and with a number of stages where the workers make one; and the number that was
/// asked for.
///
/// # Errors
/// When the file cannot be read, or says something else: names the line.
pub fn merged(args: &PipelineArgs) -> Result<(PipelineArgs, Option<usize>)> {
    let mut args = args.clone();
    if let Some(path) = &args.cluster {
        let file = read(path)?;
        merge(&mut args, file);
    }
    let asked = args.stages;
    let is_open = args.split.as_deref().is_none_or(|split| ["auto", "bytes"].contains(&split.trim()));
    if asked.is_none() && is_open && !args.workers.is_empty() {
        args.stages = Some(places::stages(&args.workers));
    }
    Ok((args, asked))
}

fn read(path: &Path) -> Result<File> {
    let wrong = |error: &dyn std::fmt::Display| usage(format!("--cluster {}: {error}", path.display()));
    let bytes = std::fs::metadata(path).map_err(|error| wrong(&error))?.len();
    if bytes > BYTES_MAX {
        return Err(wrong(&format!("{bytes} bytes are too many for such a file")));
    }
    let text = std::fs::read_to_string(path).map_err(|error| wrong(&error))?;
    parse(&text).map_err(|error| wrong(&error))
}

fn parse(text: &str) -> Result<File, toml::de::Error> {
    let file: File = toml::from_str(text)?;
    if file.stages == Some(0) {
        return Err(serde::de::Error::custom("stages = 0: a pipeline has at least one stage"));
    }
    Ok(file)
}

fn merge(args: &mut PipelineArgs, file: File) {
    if args.workers.is_empty() {
        args.workers = file.workers;
    }
    // A typed split says how many stages there are, and typed stages what a split must have.
    if args.stages.is_none() && args.split.is_none() {
        (args.stages, args.split) = (file.stages, file.split);
    }
    args.wire = args.wire.or(file.wire);
    if args.device.is_empty() {
        args.device = file.device;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const EXAMPLE: &str = "workers = ['local', 'rig2:0']\nsplit = '9,8'\nwire = 'f16'\ndevice = ['llvmpipe']\n";

    fn with(args: PipelineArgs, text: &str) -> PipelineArgs {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("cluster.toml");
        std::fs::write(&path, text).unwrap();
        merged(&PipelineArgs { cluster: Some(path), ..args }).unwrap().0
    }

    #[test]
    fn a_file_says_what_was_not_typed() {
        let found = with(PipelineArgs::default(), EXAMPLE);
        assert_eq!(found.workers, ["local", "rig2:0"]);
        assert_eq!((found.stages, found.split.as_deref()), (None, Some("9,8")));
        assert_eq!((found.wire, &found.device[..]), (Some(WireArg::F16), &["llvmpipe".to_owned()][..]));
    }

    #[test]
    fn what_was_typed_goes_before_the_file() {
        let typed = PipelineArgs {
            workers: vec!["rig3".into()],
            stages: Some(2),
            wire: Some(WireArg::F32),
            device: vec!["0".into()],
            ..PipelineArgs::default()
        };
        let found = with(typed, EXAMPLE);
        assert_eq!((&found.workers[..], found.stages, found.split), (&["rig3".to_owned()][..], Some(2), None));
        assert_eq!((found.wire, &found.device[..]), (Some(WireArg::F32), &["0".to_owned()][..]));
    }

    #[test]
    fn workers_make_stages_where_nothing_else_does() {
        assert_eq!(with(PipelineArgs::default(), "workers = ['a', 'b']").stages, Some(3));
        assert_eq!(with(PipelineArgs::default(), "workers = ['a', 'b']\nstages = 2").stages, Some(2));
        assert_eq!(with(PipelineArgs::default(), "").stages, None);
    }

    #[test]
    fn errors_name_the_line() {
        let check = |text: &str, wanted: &[&str]| {
            let error = parse(text).unwrap_err().to_string();
            assert!(wanted.iter().all(|wanted| error.contains(wanted)), "{error}");
        };
        check("workers = []\nworker = ['a']", &["line 2", "worker", "expected one of"]);
        check("wire = 'f64'", &["line 1", "f64", "f16"]);
        check("workers = 'a'", &["line 1", "workers"]);
        check("split = [1, 2]", &["line 1", "split"]);
        check("stages = 0", &["stages = 0"]);
    }
}
