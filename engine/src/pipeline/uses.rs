//! What devices take from each other: two stages on one card, or software devices on the cores of one host.

use std::sync::OnceLock;

use super::Device;
use crate::calibrate::{cores, driver_threads, machine};
use crate::law::Use;

/// What a stage on `device`, of this process, takes while it computes.
pub(super) fn of(device: &Device) -> Vec<Use> {
    match device {
        Device::Paced { .. } => Vec::new(),
        Device::Remote(device) => device.info().uses.clone(),
        Device::Reference { .. } => vec![of_cores(1)],
        // All software devices of a process share its driver's threads.
        Device::Gpu { adapter, .. } if adapter.is_software() => {
            let pool = named(&[&std::process::id().to_string(), adapter.id()]);
            vec![Use { what: pool, weight: 1.0, capacity: 1.0 }, of_cores(driver_threads())]
        }
        Device::Gpu { adapter, .. } => vec![Use { what: named(&["card", adapter.id()]), weight: 1.0, capacity: 1.0 }],
    }
}

fn of_cores(threads: usize) -> Use {
    Use { what: named(&["cores"]), weight: threads as f64, capacity: cores() as f64 }
}

/// The number of something of this host, the same in all its processes and on no other host.
fn named(words: &[&str]) -> u64 {
    static HOST: OnceLock<String> = OnceLock::new();
    // What cannot be told from other hosts shares with nobody but its own process.
    let unknown = || format!("process {}", std::process::id());
    let host = HOST.get_or_init(|| Some(machine()).filter(|machine| !machine.is_empty()).unwrap_or_else(unknown));
    let mut hasher = blake3::Hasher::new();
    for word in std::iter::once(&host.as_str()).chain(words) {
        hasher.update(word.as_bytes()).update(&[0]);
    }
    u64::from_le_bytes(std::array::from_fn(|i| hasher.finalize().as_bytes()[i]))
}

#[cfg(test)]
mod tests {
    use pp_shaders::Profile;

    use super::*;
    use crate::law::shares;

    #[test]
    fn stages_that_only_take_time_share_nothing_and_reference_stages_the_cores() {
        let cores = cores();
        let reference = of(&Device::Reference { profile: Profile::SOFTWARE });
        let paced = of(&Device::paced(Default::default(), Default::default(), Profile::SOFTWARE));
        let found = shares(std::iter::repeat_n(reference.as_slice(), cores + 1).chain([paced.as_slice()]));
        assert_eq!(found.len(), 1);
        assert_eq!((found[0].capacity, found[0].stages.len()), (cores as f64, cores + 1));
        assert_eq!(shares(std::iter::repeat_n(reference.as_slice(), cores)), [], "a core for each");
    }
}
