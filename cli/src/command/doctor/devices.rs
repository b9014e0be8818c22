//! The Vulkan loader, its drivers, and whether their devices compute what they should.

use std::fs;
use std::path::Path;

use pp_engine::backend::gpu::adapter::{Adapter, loader};
use pp_engine::cluster::health::{Finding, Severity};

use crate::command::devices::{NEEDED, SelfTest};
use crate::output::bytes;

const LOADER: &str = "Vulkan loader";
const DRIVERS: &str = "drivers";
/// Where drivers are, when these say so.
const DRIVER_VARIABLES: [&str; 2] = ["VK_DRIVER_FILES", "VK_ICD_FILENAMES"];
/// Makers of graphics cards, by their PCI number.
const MAKERS: [(&str, &str); 3] = [("0x10de", "NVIDIA"), ("0x1002", "AMD"), ("0x8086", "Intel")];
/// Work buffers of 8 billion parameters and the tables of their layers fit bindings of so many bytes.
const BINDING_BYTES: u64 = 128 << 20;

/// All of them.
pub(super) fn all(test: bool) -> Vec<Finding> {
    let mut findings = vec![match loader() {
        Ok(version) => Finding::ok(LOADER, version),
        Err(error) => {
            let advice = "install it (Debian and Ubuntu: apt-get install libvulkan1)";
            Finding::new(Severity::Error, LOADER, format!("it cannot be loaded: {error}"), advice)
        }
    }];
    let adapters = Adapter::all();
    findings.push(drivers(&adapters));
    findings.extend(adapters.iter().map(|adapter| device(adapter, test)));
    findings
}

fn drivers(adapters: &[Adapter]) -> Finding {
    let count = adapters.len();
    if adapters.is_empty() {
        let (found, advice) = match elsewhere() {
            Some((variable, value)) => (
                format!("no Vulkan device answers, and {variable} is {value}"),
                format!("unset {variable}, or let it name the driver's .json file"),
            ),
            None => (
                "no Vulkan device answers".to_owned(),
                "install your card's Vulkan driver, or Mesa's software driver (Debian and Ubuntu: apt-get install mesa-vulkan-drivers)".to_owned(),
            ),
        };
        return Finding::new(Severity::Error, DRIVERS, found, advice);
    }
    if !adapters.iter().all(Adapter::is_software) {
        return Finding::ok(DRIVERS, format!("{count} Vulkan devices"));
    }
    match card(Path::new("/sys/bus/pci/devices")) {
        Some(card) => Finding::new(
            Severity::Warning,
            DRIVERS,
            format!("there is a graphics card ({card}), and only software drivers answer"),
            "install the card's Vulkan driver, and let this user at it (groups render and video)",
        ),
        None => Finding::new(
            Severity::Note,
            DRIVERS,
            "only software drivers, which compute on the processor",
            "nothing, where there is no card; else look whether the system sees it (lspci)",
        ),
    }
}

/// The variable that says where drivers are, if one does.
fn elsewhere() -> Option<(&'static str, String)> {
    let value = |name| std::env::var_os(name).filter(|value| !value.is_empty());
    DRIVER_VARIABLES.into_iter().find_map(|name| Some((name, value(name)?.to_string_lossy().into_owned())))
}

/// A display controller of a maker whose cards have Vulkan, in sysfs.
fn card(devices: &Path) -> Option<String> {
    let read = |folder: &Path, file: &str| fs::read_to_string(folder.join(file)).ok();
    fs::read_dir(devices).ok()?.flatten().map(|entry| entry.path()).find_map(|folder| {
        let is_display = read(&folder, "class")?.starts_with("0x03");
        let vendor = read(&folder, "vendor")?;
        let maker = MAKERS.into_iter().find(|(number, _)| vendor.trim() == *number).map(|(_, maker)| maker);
        let address = folder.file_name()?.to_string_lossy().into_owned();
        maker.filter(|_| is_display).map(|maker| format!("{maker}, PCI {address}"))
    })
}

fn device(adapter: &Adapter, test: bool) -> Finding {
    let subject = format!("device {}", adapter.id());
    let info = adapter.info();
    let limits = adapter.raw().limits();
    let memory =
        adapter.memory_bytes().map_or("memory unknown".to_owned(), |size| format!("{} of memory", bytes(size)));
    let what = format!(
        "{}, {} {}, {memory}, bindings of {}",
        adapter.name(),
        info.driver,
        info.driver_info,
        bytes(limits.max_storage_buffer_binding_size)
    );
    if !adapter.raw().features().iter_names().any(|(name, _)| name == NEEDED) {
        let advice = "install a newer driver, or leave this device out (--device)";
        return Finding::new(Severity::Error, &subject, format!("{what}: its driver lacks {NEEDED}"), advice);
    }
    if limits.max_storage_buffer_binding_size < BINDING_BYTES {
        let advice = "large matrices are cut into more pieces; a newer driver may bind more";
        return Finding::new(Severity::Note, &subject, format!("{what}, which is little"), advice);
    }
    if !test {
        return Finding::ok(&subject, format!("{what}; kernels not tested"));
    }
    let tested = SelfTest::of(adapter);
    match &tested.error {
        None => Finding::ok(&subject, format!("{what}; kernels as their twins ({} dispatches)", tested.checked)),
        Some(error) => {
            let advice = "try another version of the driver, and leave this device out until then (--device)";
            Finding::new(Severity::Error, &subject, format!("{what}: {error}"), advice)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_card_is_a_display_controller_of_a_known_maker() {
        let dir = tempfile::tempdir().unwrap();
        let device = |name: &str, class: &str, vendor: &str| {
            fs::create_dir(dir.path().join(name)).unwrap();
            fs::write(dir.path().join(name).join("class"), class).unwrap();
            fs::write(dir.path().join(name).join("vendor"), vendor).unwrap();
        };
        assert_eq!(card(&dir.path().join("nothing")), None);
        device("0000:00:01.0", "0x020000\n", "0x10de\n");
        device("0000:00:02.0", "0x030000\n", "0x1234\n");
        assert_eq!(card(dir.path()), None);
        device("0000:01:00.0", "0x030200\n", "0x10de\n");
        assert_eq!(card(dir.path()).as_deref(), Some("NVIDIA, PCI 0000:01:00.0"));
    }
}
