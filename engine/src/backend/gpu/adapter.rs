//! The adapters of this machine, and how one is chosen.

use std::sync::Arc;

use pp_shaders::Profile;
use thiserror::Error;

use crate::trace::Timestamps;

/// A Vulkan adapter and what is known of it.
#[derive(Clone, Debug)]
pub struct Adapter {
    raw: wgpu::Adapter,
    index: usize,
    id: String,
    info: Arc<wgpu::AdapterInfo>,
    memory_bytes: Option<u64>,
}

/// Why no adapter was chosen.
#[derive(Debug, Error)]
#[expect(missing_docs, reason = "the messages say it")]
pub enum AdapterError {
    #[error(
        "no Vulkan adapter was found: install your card's Vulkan driver, or Mesa's software driver (Debian and Ubuntu: apt-get install libvulkan1 mesa-vulkan-drivers)"
    )]
    None,
    #[error("--device {selector}: no adapter has that index, id or name; there are: {known}")]
    NoMatch { selector: String, known: String },
    #[error("--device {selector}: more than one adapter is called that ({known}): use the index or the id")]
    Ambiguous { selector: String, known: String },
}

/// The version of Vulkan that the system's loader has.
///
/// # Errors
/// The loader's, where it cannot be loaded.
pub fn loader() -> Result<String, String> {
    // SAFETY: the library is the system's Vulkan loader, which wgpu loads in the same way.
    let entry = unsafe { ash::Entry::load() }.map_err(|error| error.to_string())?;
    // SAFETY: the function takes no handle, and `entry` is there as long as it runs.
    let version = unsafe { entry.try_enumerate_instance_version() }.map_err(|error| error.to_string())?;
    let version = version.unwrap_or(ash::vk::API_VERSION_1_0);
    let [major, minor, patch] =
        [ash::vk::api_version_major, ash::vk::api_version_minor, ash::vk::api_version_patch].map(|part| part(version));
    Ok(format!("Vulkan {major}.{minor}.{patch}"))
}

impl Adapter {
    /// Every Vulkan adapter, in the driver's order.
    pub fn all() -> Vec<Adapter> {
        let mut desc = wgpu::InstanceDescriptor::new_without_display_handle();
        desc.backends = wgpu::Backends::VULKAN;
        desc.flags = wgpu::InstanceFlags::empty();
        let instance = wgpu::Instance::new(desc);
        let adapters = pollster::block_on(instance.enumerate_adapters(wgpu::Backends::VULKAN));
        let mut all: Vec<Adapter> = Vec::new();
        for (index, raw) in adapters.into_iter().enumerate() {
            let info = raw.get_info();
            let id = id(&info, all.iter().map(|adapter| adapter.id.as_str()));
            all.push(Adapter { index, id, info: Arc::new(info), memory_bytes: memory_bytes(&raw), raw });
        }
        all
    }

    /// The adapters of a pipeline of `stages` stages. Each of `selectors` is an index, an id ([`Adapter::id`]) or
    /// part of a name; fewer than stages repeat in turn; none means every hardware adapter, or a software one if there is nothing
    /// else.
    ///
    /// # Errors
    /// [`AdapterError`].
    pub fn choose(all: &[Adapter], selectors: &[String], stages: usize) -> Result<Vec<Adapter>, AdapterError> {
        if all.is_empty() {
            return Err(AdapterError::None);
        }
        let chosen: Vec<&Adapter> = if selectors.is_empty() {
            let hardware: Vec<&Adapter> = all.iter().filter(|a| !a.is_software()).collect();
            let software = all.iter().filter(|a| a.is_software());
            // Of software drivers the fastest known comes first; one is enough, they share the same cores.
            let best = software.min_by_key(|a| !a.info.name.contains("llvmpipe"));
            if hardware.is_empty() { best.into_iter().collect() } else { hardware }
        } else {
            selectors.iter().map(|selector| Adapter::find(all, selector)).collect::<Result<_, _>>()?
        };
        Ok((0..stages).map(|stage| chosen[stage % chosen.len()].clone()).collect())
    }

    fn find<'a>(all: &'a [Adapter], selector: &str) -> Result<&'a Adapter, AdapterError> {
        let names = |adapters: &[&Adapter]| {
            adapters.iter().map(|a| format!("{} {}", a.id(), a.name())).collect::<Vec<_>>().join(", ")
        };
        let by_id = all.iter().find(|a| a.index.to_string() == selector || a.id == selector);
        if let Some(adapter) = by_id {
            return Ok(adapter);
        }
        let wanted = selector.to_lowercase();
        let by_name: Vec<&Adapter> = match selector.parse::<usize>() {
            Ok(_) => Vec::new(),
            Err(_) => {
                all.iter().filter(|a| !wanted.is_empty() && a.info.name.to_lowercase().contains(&wanted)).collect()
            }
        };
        match by_name.as_slice() {
            [one] => Ok(one),
            [] => Err(AdapterError::NoMatch {
                selector: selector.to_owned(),
                known: names(&all.iter().collect::<Vec<_>>()),
            }),
            several => Err(AdapterError::Ambiguous { selector: selector.to_owned(), known: names(several) }),
        }
    }

    /// The wgpu adapter.
    pub fn raw(&self) -> &wgpu::Adapter {
        &self.raw
    }

    /// Place in the enumeration.
    pub fn index(&self) -> usize {
        self.index
    }

    /// What the driver says of it.
    pub fn info(&self) -> &wgpu::AdapterInfo {
        &self.info
    }

    /// Name, as the driver gives it.
    pub fn name(&self) -> &str {
        &self.info.name
    }

    /// PCI address `dddd:bb:dd.f`, empty for software adapters.
    pub fn pci_id(&self) -> &str {
        &self.info.device_pci_bus_id
    }

    /// What stays the same when another adapter is added: the PCI address where there is one, else the driver's name
    /// as one word, with `#2` and so on where several have it.
    pub fn id(&self) -> &str {
        &self.id
    }

    /// Whether the host's processor does the work.
    pub fn is_software(&self) -> bool {
        self.info.device_type == wgpu::DeviceType::Cpu
    }

    /// Bytes of the largest device-local heap, where the driver tells.
    pub fn memory_bytes(&self) -> Option<u64> {
        self.memory_bytes
    }

    /// Which clock times what it does.
    pub fn timestamps(&self) -> Timestamps {
        let has_clock = self.raw.features().contains(wgpu::Features::TIMESTAMP_QUERY);
        if has_clock { Timestamps::Device } else { Timestamps::Host }
    }

    /// The profile that suits it.
    pub fn profile(&self) -> Profile {
        if self.is_software() { Profile::SOFTWARE } else { Profile::CARD }
    }
}

/// An id that none of `others` has.
fn id<'a>(info: &wgpu::AdapterInfo, others: impl Iterator<Item = &'a str>) -> String {
    if !info.device_pci_bus_id.is_empty() {
        return info.device_pci_bus_id.clone();
    }
    let word = word(&info.name, info.device_type == wgpu::DeviceType::Cpu);
    let same = others.filter(|other| other.split('#').next() == Some(&word)).count();
    if same == 0 { word } else { format!("{word}#{}", same + 1) }
}

/// A device's name as one word, without what drivers add in brackets; of a software driver, its first word.
fn word(name: &str, software: bool) -> String {
    let name = name.split('(').next().unwrap_or(name).to_lowercase();
    let mut words = name.split(|c: char| !c.is_ascii_alphanumeric()).filter(|word| !word.is_empty());
    let word = if software { words.next().unwrap_or_default().to_owned() } else { words.collect::<Vec<_>>().join("-") };
    // An index is all digits.
    if word.bytes().all(|byte| byte.is_ascii_digit()) { format!("gpu-{word}") } else { word }
}

/// wgpu does not tell the size of memory; Vulkan does.
fn memory_bytes(adapter: &wgpu::Adapter) -> Option<u64> {
    // SAFETY: the handle is used for one query of the physical device while the adapter is alive.
    let properties = unsafe {
        let hal = adapter.as_hal::<wgpu::hal::api::Vulkan>()?;
        hal.shared_instance().raw_instance().get_physical_device_memory_properties(hal.raw_physical_device())
    };
    let heaps = properties.memory_heaps_as_slice().iter();
    heaps.filter(|heap| heap.flags.contains(ash::vk::MemoryHeapFlags::DEVICE_LOCAL)).map(|heap| heap.size).max()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_become_words() {
        for (name, software, expected) in [
            ("llvmpipe (LLVM 15.0.6, 256 bits)", true, "llvmpipe"),
            ("SwiftShader Device (LLVM 10.0.0)", true, "swiftshader"),
            ("Apple M2 Max", false, "apple-m2-max"),
            ("Mali-G78 (r40p0)", false, "mali-g78"),
            ("4090", false, "gpu-4090"),
            ("", false, "gpu-"),
        ] {
            assert_eq!(word(name, software), expected);
        }
    }

    #[test]
    fn ids_are_unique_and_pci_addresses_win() {
        let mut info = wgpu::AdapterInfo::new(wgpu::DeviceType::Cpu, wgpu::Backend::Vulkan);
        info.name = "llvmpipe (LLVM 15.0.6, 256 bits)".to_owned();
        assert_eq!(id(&info, ["swiftshader"].into_iter()), "llvmpipe");
        assert_eq!(id(&info, ["llvmpipe", "llvmpipe#2"].into_iter()), "llvmpipe#3");
        info.device_pci_bus_id = "0000:01:00.0".to_owned();
        assert_eq!(id(&info, ["llvmpipe"].into_iter()), "0000:01:00.0");
    }
}
