//! Where the stages run: what `--workers` says. Pure.

use anyhow::Result;
use pp_transport::identity::Name;

use super::LOCAL;
use crate::errors::usage;

/// Where a stage runs, and on which device if one was picked.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Place {
    /// The worker; none: this machine.
    pub worker: Option<Name>,
    /// As typed.
    pub device: Option<String>,
}

impl Place {
    /// This machine, on a device of `--device`.
    const HERE: Place = Place { worker: None, device: None };

    fn parse(typed: &str) -> Result<Place> {
        // A device may have colons of its own: it is a PCI address, often.
        let (name, device) = match typed.split_once(':') {
            Some((_, "")) => return Err(usage(format!("--workers {typed}: no device follows the colon"))),
            Some((name, device)) => (name, Some(device.to_owned())),
            None => (typed, None),
        };
        let worker = match name {
            LOCAL => None,
            name => Some(
                name.parse()
                    .map_err(|error: pp_transport::identity::NameError| usage(format!("--workers {typed}: {error}")))?,
            ),
        };
        Ok(Place { worker, device })
    }
}

/// How many stages these names make where neither --stages nor --split says it.
pub fn stages(names: &[String]) -> usize {
    let has_local = names.iter().any(|name| name == LOCAL || name.starts_with("local:"));
    names.len() + usize::from(!has_local)
}

/// The place of each of `stages` stages.
///
/// # Errors
/// When there are too few or too many names, or one is none.
pub fn of(names: &[String], stages: usize) -> Result<Vec<Place>> {
    let mut places = names.iter().map(|typed| Place::parse(typed)).collect::<Result<Vec<_>>>()?;
    if places.len() == stages {
        return Ok(places);
    }
    let has_local = places.iter().any(|place| place.worker.is_none());
    if places.len() + 1 == stages && !has_local {
        places.insert(0, Place::HERE);
        return Ok(places);
    }
    let given = places.len();
    let all = format!("{stages} for exactly those, `{LOCAL}` being this machine");
    Err(usage(match stages {
        _ if has_local => format!(
            "--workers names {given} places for {stages} stage(s), `{LOCAL}` among them: name {stages}, one for each"
        ),
        1 => format!("--workers names {given} workers for 1 stage; give --stages or --split"),
        _ => format!(
            "--workers names {given} for {stages} stages: name {} (stage 0 runs here then), or {all}",
            stages - 1
        ),
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(names: &[&str]) -> Vec<String> {
        names.iter().map(|name| (*name).to_owned()).collect()
    }

    fn worker(name: &str, device: Option<&str>) -> Place {
        Place { worker: Some(name.parse().unwrap()), device: device.map(str::to_owned) }
    }

    #[test]
    fn one_name_fewer_leaves_the_first_stage_here() {
        let found = of(&names(&["rig2", "rig3"]), 3).unwrap();
        assert_eq!(found, [Place::HERE, worker("rig2", None), worker("rig3", None)]);
        assert_eq!(of(&names(&["rig2", "rig2"]), 3).unwrap()[1..], [worker("rig2", None), worker("rig2", None)]);
    }

    #[test]
    fn a_name_for_each_is_exactly_those() {
        let found = of(&names(&["rig2", "local:0000:01:00.0", "rig3:llvmpipe"]), 3).unwrap();
        let here = Place { worker: None, device: Some("0000:01:00.0".to_owned()) };
        assert_eq!(found, [worker("rig2", None), here, worker("rig3", Some("llvmpipe"))]);
        assert_eq!(of(&names(&["rig2"]), 1).unwrap(), [worker("rig2", None)]);
    }

    #[test]
    fn anything_else_is_refused() {
        let refused = |typed: &[&str], stages, wanted: &str| {
            let error = of(&names(typed), stages).unwrap_err().to_string();
            assert!(error.contains(wanted), "{error}");
        };
        refused(&["rig2", "rig3"], 4, "name 3 (stage 0 runs here then), or 4");
        refused(&["rig2", "rig3"], 1, "give --stages or --split");
        refused(&["local", "rig3"], 3, "name 3, one for each");
        refused(&["rig2:"], 2, "no device");
        refused(&["Rig2"], 2, "not a name");
        refused(&[""], 2, "not a name");
    }

    #[test]
    fn names_make_stages_where_nothing_else_does() {
        assert_eq!(stages(&names(&["rig2", "rig3"])), 3);
        assert_eq!(stages(&names(&["local", "rig3"])), 2);
        assert_eq!(stages(&names(&["rig3", "local:0"])), 2);
    }
}
