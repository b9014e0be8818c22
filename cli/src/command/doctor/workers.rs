//! The workers of this head's cluster: whether they answer, how far away they are, and what they say of themselves.

use anyhow::Result;
use pp_engine::cluster::health::{Finding, Health, Severity};
use pp_engine::cluster::remote::{LeaseError, Worker};
use pp_engine::contract::Build;
use pp_transport::identity::UnixTime;
use pp_transport::members::Member;

use super::Row;
use super::machine::{days_left, known_models};
use crate::cluster::Here;
use crate::command::cluster::{Look, every, look};
use crate::output::bytes;

/// Clocks may differ by so much: then logs still tell what came first.
const CLOCK_SECONDS: f64 = 5.0;
/// From here on, certificates that were just made are not valid yet.
const CLOCK_SECONDS_BAD: f64 = 1800.0;
/// A longer way makes every token wait.
const RTT_MS: f64 = 5.0;
/// Less carries a prompt of a large model slower than cards compute it: about a gigabit a second.
const BYTES_PER_S: f64 = 60e6;
/// Of Ethernet: what QUIC's datagrams may have of 1500.
const MTU: u16 = 1452;
const DAYS_FEW: u64 = 15;

/// All of them.
pub(super) fn all(with_bandwidth: bool) -> Vec<Row> {
    looked(with_bandwidth).unwrap_or_else(|error| {
        let found = format!("{error:#}");
        let finding = Finding::new(Severity::Error, "cluster", found, "`--cluster` is for the head of a cluster");
        vec![Row { host: None, finding }]
    })
}

fn looked(with_bandwidth: bool) -> Result<Vec<Row>> {
    let here = Here::open()?;
    let node = here.node()?;
    let members: Vec<Member> = here.workers().cloned().collect();
    if members.is_empty() {
        let advice = "start `pp-run worker` on another machine, which prints what to run here";
        let finding = Finding::new(Severity::Note, "cluster", "it has no workers yet", advice);
        return Ok(vec![Row { host: None, finding }]);
    }
    let models = known_models();
    let looks = every(&node, &members, &here.greeting(), |worker: &Worker| {
        let seen = look(&here, worker, with_bandwidth);
        Ok((seen, worker.health(&models)))
    });
    let rows = members.iter().zip(looks).flat_map(|(member, looked)| {
        let findings = match looked {
            Ok((look, health)) => of_worker(&look, health),
            Err(error) => vec![unreachable(member, &error)],
        };
        let host = member.name.to_string();
        findings.into_iter().map(move |finding| Row { host: Some(host.clone()), finding })
    });
    Ok(rows.collect())
}

fn unreachable(member: &Member, error: &LeaseError) -> Finding {
    let port = member.address.as_ref().and_then(|address| address.as_str().rsplit(':').next().map(str::to_owned));
    let advice = format!(
        "look whether `pp-run worker` runs there, and whether its firewall lets UDP in on port {}",
        port.unwrap_or_default()
    );
    Finding::new(Severity::Error, "reach", error.to_string(), advice)
}

fn of_worker(look: &Look, health: Result<(Health, f64), LeaseError>) -> Vec<Finding> {
    let welcome = &look.welcome;
    let mut findings = vec![version(&welcome.build)];
    findings.extend(look.stale.as_ref().map(|why| {
        let advice = "restart the worker; if it stays, remove it and enrol it again";
        Finding::new(Severity::Warning, "members", format!("it does not take the present list: {why}"), advice)
    }));
    findings.extend(way(look));
    findings.push(until(
        "certificate",
        UnixTime::since_unix_epoch(std::time::Duration::from_secs(welcome.certificate_until)),
    ));
    let names: Vec<String> = welcome.devices.iter().map(|device| format!("{} {}", device.id, device.name)).collect();
    findings.push(if welcome.devices.iter().all(|device| device.is_software) {
        let found = format!("only on the processor: {}", names.join(", "));
        Finding::new(Severity::Note, "devices", found, "`pp-run doctor` there says what drivers it has")
    } else {
        Finding::ok("devices", names.join(", "))
    });
    if welcome.draining {
        findings.push(Finding::new(
            Severity::Note,
            "state",
            "it is drained and takes nothing new",
            "`pp-run cluster drain --undo` lets it work again",
        ));
    }
    match health {
        Ok((health, ahead)) => {
            findings.push(clock(ahead));
            findings.extend(health.findings);
        }
        Err(error) => {
            let advice = "run `pp-run doctor` there";
            findings.push(Finding::new(Severity::Warning, "state", error.to_string(), advice));
        }
    }
    findings
}

fn version(build: &Build) -> Finding {
    let (ours, theirs) = (Build::this(), build);
    let text =
        |build: &Build| format!("{} for {}{}", build.version, build.target, if build.debug { ", debug" } else { "" });
    if ours == *theirs {
        return Finding::ok("version", text(theirs));
    }
    let found = format!("it runs {}, this head {}", text(theirs), text(&ours));
    Finding::new(Severity::Warning, "version", found, "install the same release on both")
}

/// Round trip, MTU and bandwidth.
fn way(look: &Look) -> Vec<Finding> {
    let mut findings = Vec::new();
    if let Some(ms) = look.rtt.map(|rtt| rtt.as_secs_f64() * 1e3) {
        let found = format!("{ms:.2} ms there and back");
        findings.push(if ms > RTT_MS {
            let advice = "every token waits for it: use a cable instead of a radio, and fewer stages elsewhere";
            Finding::new(Severity::Note, "round trip", found, advice)
        } else {
            Finding::ok("round trip", found)
        });
    }
    let found = format!("datagrams of {} bytes pass", look.mtu);
    findings.push(if look.mtu < MTU {
        let advice = "a tunnel or a device on the way has a small MTU; large frames cost more there";
        Finding::new(Severity::Note, "MTU", found, advice)
    } else {
        Finding::ok("MTU", found)
    });
    if let Some(rate) = look.bandwidth {
        let found = format!("{}/s there and back at once", bytes(rate as u64));
        findings.push(if rate < BYTES_PER_S {
            let advice = "prompts wait for it: --wire f16 sends half the bytes, q8 less than a third";
            Finding::new(Severity::Note, "bandwidth", found, advice)
        } else {
            Finding::ok("bandwidth", found)
        });
    }
    findings
}

fn until(subject: &str, end: UnixTime) -> Finding {
    match days_left(end) {
        Some(days) if days >= DAYS_FEW => Finding::ok(subject, format!("good for {days} days")),
        days => Finding::new(
            Severity::Warning,
            subject,
            days.map_or("it has expired".to_owned(), |days| format!("it ends in {days} days")),
            "it was to be renewed by now: look at the worker's log and at the clocks",
        ),
    }
}

fn clock(ahead: f64) -> Finding {
    let direction = if ahead < 0.0 { "behind" } else { "ahead" };
    let found = format!("{:.3} s {direction}", ahead.abs());
    let severity = match ahead.abs() {
        seconds if seconds > CLOCK_SECONDS_BAD => Severity::Warning,
        seconds if seconds > CLOCK_SECONDS => Severity::Note,
        _ => return Finding::ok("clock", found),
    };
    Finding::new(severity, "clock", found, "keep the clocks of both machines right (systemd-timesyncd, chrony)")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clocks_that_are_wrong_are_told() {
        for (ahead, severity) in [
            (0.2, Severity::Ok),
            (-4.9, Severity::Ok),
            (6.0, Severity::Note),
            (-60.0, Severity::Note),
            (4000.0, Severity::Warning),
        ] {
            assert_eq!(clock(ahead).severity, severity, "{ahead}");
        }
        assert!(clock(-60.0).found.contains("60.000 s behind"));
    }

    #[test]
    fn certificates_end() {
        let at = |days: u64| {
            let now = UnixTime::now().as_secs() + 60 + days * 24 * 3600;
            until("certificate", UnixTime::since_unix_epoch(std::time::Duration::from_secs(now))).severity
        };
        assert_eq!((at(80), at(DAYS_FEW), at(DAYS_FEW - 1)), (Severity::Ok, Severity::Ok, Severity::Warning));
        assert!(until("certificate", UnixTime::since_unix_epoch(std::time::Duration::ZERO)).found.contains("expired"));
    }

    #[test]
    fn another_release_is_told() {
        assert_eq!(version(&Build::this()).severity, Severity::Ok);
        let other = Build { version: "0.0.1".to_owned(), ..Build::this() };
        assert_eq!(version(&other).severity, Severity::Warning);
    }
}
