//! The adapters of this machine, and how one is chosen.

use pp_shaders::Profile;
use thiserror::Error;

/// A Vulkan adapter and what is known of it.
#[derive(Clone, Debug)]
pub struct Adapter {
    raw: wgpu::Adapter,
    index: usize,
    info: wgpu::AdapterInfo,
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
    #[error("--device {selector}: no adapter has that index, PCI id or name; there are: {known}")]
    NoMatch { selector: String, known: String },
    #[error("--device {selector}: more than one adapter is called that ({known}): use the index or the PCI id")]
    Ambiguous { selector: String, known: String },
}

impl Adapter {
    /// Every Vulkan adapter, in the driver's order.
    pub fn all() -> Vec<Adapter> {
        let mut desc = wgpu::InstanceDescriptor::new_without_display_handle();
        desc.backends = wgpu::Backends::VULKAN;
        desc.flags = wgpu::InstanceFlags::empty();
        let instance = wgpu::Instance::new(desc);
        let adapters = pollster::block_on(instance.enumerate_adapters(wgpu::Backends::VULKAN));
        adapters
            .into_iter()
            .enumerate()
            .map(|(index, raw)| Adapter { index, info: raw.get_info(), memory_bytes: memory_bytes(&raw), raw })
            .collect()
    }

    /// The adapters of a pipeline of `stages` stages. Each of `selectors` is an index, a PCI id or part of a name;
    /// fewer than stages repeat in turn; none means every hardware adapter, or a software one if there is nothing
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
        let by_id =
            all.iter().find(|a| a.index.to_string() == selector || (!a.pci_id().is_empty() && a.pci_id() == selector));
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

    /// PCI address where there is one, else the index: what `--device` takes.
    pub fn id(&self) -> String {
        if self.pci_id().is_empty() { self.index.to_string() } else { self.pci_id().to_owned() }
    }

    /// Whether the host's processor does the work.
    pub fn is_software(&self) -> bool {
        self.info.device_type == wgpu::DeviceType::Cpu
    }

    /// Bytes of the largest device-local heap, where the driver tells.
    pub fn memory_bytes(&self) -> Option<u64> {
        self.memory_bytes
    }

    /// The profile that suits it.
    pub fn profile(&self) -> Profile {
        if self.is_software() { Profile::SOFTWARE } else { Profile::CARD }
    }
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
