//! Two hosts as far as the network can tell: namespaces with a pair of virtual Ethernet devices between them.

use std::io::Write;
use std::process::Command;
use std::time::{Duration, Instant};

use super::processes::{Machine, Running};
use crate::support::data;

const MODEL: &str = "tiny/llama-linear-rope";
const ADDRESSES: [&str; 2] = ["198.18.77.1", "198.18.77.2"];

fn ip(arguments: &[&str]) -> Result<(), String> {
    let output = Command::new("ip").args(arguments).output().map_err(|error| format!("ip: {error}"))?;
    if output.status.success() {
        return Ok(());
    }
    Err(format!("ip {}: {}", arguments.join(" "), String::from_utf8_lossy(&output.stderr).trim()))
}

/// Two namespaces; they go with this.
struct Namespaces([String; 2]);

impl Namespaces {
    fn new() -> Result<Namespaces, String> {
        let names = ["a", "b"].map(|side| format!("pp{}{side}", std::process::id()));
        for name in &names {
            ip(&["netns", "add", name])?;
        }
        let made = Namespaces(names);
        let [a, b] = &made.0;
        ip(&[
            "link", "add", a, "mtu", "1500", "netns", a, "type", "veth", "peer", "name", b, "mtu", "1500", "netns", b,
        ])?;
        for (name, address) in made.0.iter().zip(ADDRESSES) {
            ip(&["-n", name, "address", "add", &format!("{address}/24"), "dev", name])?;
            ip(&["-n", name, "link", "set", name, "up"])?;
            ip(&["-n", name, "link", "set", "lo", "up"])?;
        }
        Ok(made)
    }
}

impl Drop for Namespaces {
    fn drop(&mut self) {
        for name in &self.0 {
            let _ = ip(&["netns", "delete", name]);
        }
    }
}

/// A worker in another namespace: the same bits over Ethernet with its MTU of 1500; a cable that is pulled is noticed
/// within the time that is promised, and once it is back the next run works.
#[test]
fn a_cable_between_two_hosts() {
    let namespaces = match Namespaces::new() {
        Ok(namespaces) => namespaces,
        Err(reason) => {
            let said = format!("a_cable_between_two_hosts was skipped: no network namespaces here ({reason})\n");
            std::io::stderr().write_all(said.as_bytes()).unwrap();
            return;
        }
    };
    let [head, there] = &namespaces.0;
    let (head, machine) = (Machine::at(Some(head.clone())), Machine::at(Some(there.clone())));
    head.object(&["cluster", "init"]);
    machine.take_model(MODEL, "renamed");
    let mut worker = machine.worker("rig2", Some(&format!("{}:7711", ADDRESSES[1])), &[], &[]);
    let invitation = worker.invitation();
    head.object(&invitation.iter().map(String::as_str).collect::<Vec<_>>());
    worker.ready();
    let status = head.object(&["cluster", "status"]);
    let mtu = status["members"][0]["mtu"].as_u64().unwrap();
    assert!((1200..=1472).contains(&mtu), "{status}");

    let m = data(MODEL).to_str().expect("a path in UTF-8").to_owned();
    let run = |more: &[&str]| {
        let usual = ["-m", &m, "--raw", "-n", "16", "--activations", "f32", "--device", "reference", "--split", "1,2"];
        head.object(&[&usual[..], more, &["Of run is a stage"]].concat())["tokens"].clone()
    };
    assert_eq!(run(&["--workers", "rig2"]), run(&[]));

    let endless =
        ["bench", "-m", &m, "--workers", "rig2", "--device", "reference", "--reps", "100000", "--no-roofline"];
    let mut busy = Running::start(&mut head.program(&endless));
    busy.says("repetitions");
    std::thread::sleep(Duration::from_millis(500));
    let cable = &namespaces.0[1];
    ip(&["-n", cable, "link", "set", cable, "down"]).unwrap();
    let since = Instant::now();
    let told = busy.says("rig2 is lost");
    assert!(told.contains("stage 1 on rig2"), "{told}");
    assert!(since.elapsed() < Duration::from_secs(4), "{:?}", since.elapsed());
    assert_eq!(busy.end().0, Some(1));
    ip(&["-n", cable, "link", "set", cable, "up"]).unwrap();
    assert_eq!(run(&["--workers", "rig2"]), run(&[]));
}
