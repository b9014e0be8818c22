//! Networks that are made for a measurement and go with it: two network namespaces with a cable between them.

use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};

use super::relay::{Relay, Weather};

/// Addresses of the two ends, of the range for benchmarks (RFC 2544).
pub(super) const ADDRESSES: [&str; 2] = ["198.18.78.1", "198.18.78.2"];
/// What Ethernet carries.
const MTU: &str = "1500";

/// Tells namespaces of one process apart.
static MADE: AtomicU32 = AtomicU32::new(0);

/// Two network namespaces; they go with this.
pub(super) struct Namespaces {
    names: [String; 2],
    _relay: Option<Relay>,
}

impl Namespaces {
    /// With a pair of virtual Ethernet devices between them.
    ///
    /// # Errors
    /// In words, why there are none.
    pub(super) fn with_cable() -> Result<Namespaces, String> {
        let made = Namespaces::new()?;
        let [a, b] = &made.names;
        ip(&["link", "add", a, "mtu", MTU, "netns", a, "type", "veth", "peer", "name", b, "mtu", MTU, "netns", b])?;
        made.address()?;
        Ok(made)
    }

    /// With a TUN device in each, and a relay of this process between the two.
    ///
    /// # Errors
    /// In words, why there are none.
    pub(super) fn with_relay(weather: Weather) -> Result<Namespaces, String> {
        let mut made = Namespaces::new()?;
        made._relay = Some(Relay::between(&made.names, weather)?);
        made.address()?;
        Ok(made)
    }

    fn new() -> Result<Namespaces, String> {
        if !rustix::process::geteuid().is_root() {
            return Err("network namespaces need root".to_owned());
        }
        let number = MADE.fetch_add(1, Ordering::Relaxed);
        let names = ["a", "b"].map(|side| format!("pp{}n{number}{side}", std::process::id()));
        // Dropped with what is there of it when the rest fails.
        let made = Namespaces { names, _relay: None };
        for name in &made.names {
            ip(&["netns", "add", name])?;
        }
        Ok(made)
    }

    /// Gives the devices, which are called as their namespaces, their addresses.
    fn address(&self) -> Result<(), String> {
        for (name, address) in self.names.iter().zip(ADDRESSES) {
            ip(&["-n", name, "address", "add", &format!("{address}/24"), "dev", name])?;
            ip(&["-n", name, "link", "set", name, "mtu", MTU, "up"])?;
            ip(&["-n", name, "link", "set", "lo", "up"])?;
        }
        Ok(())
    }

    /// Their names: of the end that measures, and of the one that serves.
    pub(super) fn names(&self) -> &[String; 2] {
        &self.names
    }
}

impl Drop for Namespaces {
    fn drop(&mut self) {
        for name in &self.names {
            let _ = ip(&["netns", "delete", name]);
        }
    }
}

fn ip(arguments: &[&str]) -> Result<(), String> {
    let output = Command::new("ip").args(arguments).output().map_err(|error| format!("ip: {error}"))?;
    if output.status.success() {
        return Ok(());
    }
    Err(format!("ip {}: {}", arguments.join(" "), String::from_utf8_lossy(&output.stderr).trim()))
}
