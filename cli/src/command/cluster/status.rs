//! How the members of the cluster are.

use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::Result;
use pp_engine::cluster::control::{DeviceInfo, Holder};
use pp_engine::cluster::remote::{LeaseError, Worker};
use pp_transport::identity::UnixTime;
use pp_transport::members::Member;
use serde::Serialize;

use crate::args::StatusArgs;
use crate::cluster::Here;
use crate::errors::Exit;
use crate::output::{Out, Report, bytes, printable, table};
use crate::report::layer_range;

/// Blocks of a MiB that go there and back, if there is time; the fastest counts.
const BLOCKS: usize = 5;
/// How long there is time to measure: the first round trips, payloads and blocks are poor.
const LOOK: Duration = Duration::from_millis(1000);
/// The part of it in which nothing but round trips is measured.
const QUIET: Duration = Duration::from_millis(300);
const DAY: u64 = 24 * 3600;

/// Looks at all at once and tells.
pub fn run(args: &StatusArgs) -> Result<ExitCode> {
    let out = Out::new(args.output.json, false);
    let here = Here::open()?;
    let node = here.node()?;
    let members: Vec<Member> = here.workers().cloned().collect();
    let looked = super::every(&node, &members, &here.greeting(), |worker| Ok(look(&here, worker, !args.no_bandwidth)));
    let rows: Vec<Row> = members.iter().zip(looked).map(|(member, look)| Row::new(member, look)).collect();
    let all_answer = rows.iter().all(|row| row.answers);
    let identity = &here.head().identity;
    let report = StatusReport {
        cluster: identity.name().cluster.to_string(),
        head: identity.name().name.to_string(),
        folder: here.store().folder().display().to_string(),
        version: env!("CARGO_PKG_VERSION"),
        members_version: here.head().members.version(),
        certificate_days: days_left(identity.certificate().not_after().as_secs()),
        members: rows,
    };
    out.result(&report)?;
    Ok(if all_answer { ExitCode::SUCCESS } else { ExitCode::from(Exit::Worker as u8) })
}

fn days_left(until: u64) -> u64 {
    until.saturating_sub(UnixTime::now().as_secs()) / DAY
}

/// What was found out at one worker.
pub(in crate::command) struct Look {
    /// As it introduced itself, with the list and the certificate that it has now.
    pub(in crate::command) welcome: pp_engine::cluster::control::Welcome,
    pub(in crate::command) rtt: Option<Duration>,
    pub(in crate::command) mtu: u16,
    /// Bytes a second, there and back at once.
    pub(in crate::command) bandwidth: Option<f64>,
    /// Why it does not take the present list or certificate.
    pub(in crate::command) stale: Option<String>,
}

/// Gives a worker the present list and certificate, and looks how far away it is.
pub(in crate::command) fn look(here: &Here, worker: &Worker, with_bandwidth: bool) -> Look {
    let mut look = Look { welcome: worker.welcome().clone(), rtt: None, mtu: 0, bandwidth: None, stale: None };
    match here.freshen(worker) {
        Ok(fresh) => {
            look.welcome.members_version = fresh.members_version;
            look.welcome.certificate_until = fresh.certificate_until;
        }
        Err(error) => look.stale = Some(format!("{error:#}")),
    }
    look.measure(worker, with_bandwidth);
    look
}

impl Look {
    fn measure(&mut self, worker: &Worker, with_bandwidth: bool) {
        let until = Instant::now() + LOOK;
        // What passes is looked for while the line is quiet.
        std::thread::sleep(QUIET);
        let quiet = worker.mtu();
        let mut block = 0;
        while with_bandwidth && block < BLOCKS && (block == 0 || Instant::now() < until) {
            block += 1;
            self.bandwidth = worker.bandwidth(1).ok().into_iter().chain(self.bandwidth).reduce(f64::max);
        }
        std::thread::sleep(until.saturating_duration_since(Instant::now()));
        // The shortest of all until now.
        (self.rtt, self.mtu) = (worker.round_trip(), worker.mtu().max(quiet));
    }
}

#[derive(Debug, Serialize)]
struct StatusReport {
    cluster: String,
    head: String,
    folder: String,
    /// Of this program.
    version: &'static str,
    members_version: u64,
    /// Of the head's certificate.
    certificate_days: u64,
    members: Vec<Row>,
}

#[derive(Debug, Serialize)]
struct Row {
    name: String,
    address: String,
    key: String,
    /// Whether it answers; the rest is null where it does not.
    answers: bool,
    /// `ready`, `held`, `draining` or `unreachable`.
    state: &'static str,
    /// Why it is not reached, or not up to date.
    error: Option<String>,
    version: Option<String>,
    up_seconds: Option<u64>,
    members_version: Option<u64>,
    certificate_days: Option<u64>,
    devices: Vec<DeviceRow>,
    memory_bytes: Option<u64>,
    memory_free_bytes: Option<u64>,
    rtt_ms: Option<f64>,
    mtu: Option<u16>,
    /// There and back at once.
    bandwidth_bytes_per_s: Option<f64>,
    held_by: Option<String>,
    held_since: Option<u64>,
    stages: Vec<StageRow>,
}

#[derive(Debug, Serialize)]
struct DeviceRow {
    id: String,
    name: String,
    profile: String,
    memory_bytes: Option<u64>,
    is_software: bool,
}

impl DeviceRow {
    fn of(info: &DeviceInfo) -> DeviceRow {
        DeviceRow {
            id: printable(&info.id),
            name: printable(&info.name),
            profile: printable(&info.profile),
            memory_bytes: info.memory_bytes,
            is_software: info.is_software,
        }
    }
}

/// A stage that a worker holds.
#[derive(Debug, Serialize)]
struct StageRow {
    index: usize,
    /// First layer and the one after the last.
    layers: (usize, usize),
    device_id: String,
}

impl Row {
    fn new(member: &Member, look: Result<Look, LeaseError>) -> Row {
        let unreachable = Row {
            name: member.name.to_string(),
            address: member.address.as_ref().map_or(String::new(), ToString::to_string),
            key: member.fingerprint.to_string(),
            answers: false,
            state: "unreachable",
            error: None,
            version: None,
            up_seconds: None,
            members_version: None,
            certificate_days: None,
            devices: Vec::new(),
            memory_bytes: None,
            memory_free_bytes: None,
            rtt_ms: None,
            mtu: None,
            bandwidth_bytes_per_s: None,
            held_by: None,
            held_since: None,
            stages: Vec::new(),
        };
        let Look { welcome, rtt, mtu, bandwidth, stale } = match look {
            Ok(look) => look,
            Err(error) => return Row { error: Some(error.to_string()), ..unreachable },
        };
        let Holder { head, since, stages } =
            welcome.holder.clone().unwrap_or(Holder { head: String::new(), since: 0, stages: Vec::new() });
        let is_held = welcome.holder.is_some();
        Row {
            answers: true,
            state: match (welcome.draining, is_held) {
                (true, _) => "draining",
                (false, true) => "held",
                (false, false) => "ready",
            },
            error: stale,
            version: Some(printable(&welcome.build.version)),
            up_seconds: Some(welcome.up_seconds),
            members_version: Some(welcome.members_version),
            certificate_days: Some(days_left(welcome.certificate_until)),
            devices: welcome.devices.iter().map(DeviceRow::of).collect(),
            memory_bytes: welcome.memory.map(|(all, _)| all),
            memory_free_bytes: welcome.memory.map(|(_, free)| free),
            rtt_ms: rtt.map(|rtt| rtt.as_secs_f64() * 1e3),
            mtu: Some(mtu),
            bandwidth_bytes_per_s: bandwidth,
            held_by: is_held.then(|| printable(&head)),
            held_since: is_held.then_some(since),
            stages: stages
                .iter()
                .map(|(index, layers, device)| StageRow {
                    index: *index,
                    layers: *layers,
                    device_id: printable(device),
                })
                .collect(),
            ..unreachable
        }
    }

    fn cells(&self) -> Vec<String> {
        let dash = || "-".to_owned();
        let state = match &self.held_by {
            Some(head) if self.state == "held" => format!("held by {head}"),
            _ => self.state.to_owned(),
        };
        let devices: Vec<String> = self.devices.iter().map(|device| format!("{} {}", device.id, device.name)).collect();
        vec![
            self.name.clone(),
            self.address.clone(),
            state,
            if devices.is_empty() { dash() } else { devices.join(", ") },
            self.version.clone().unwrap_or_else(dash),
            self.memory_free_bytes.map_or_else(dash, bytes),
            self.rtt_ms.map_or_else(dash, |ms| format!("{ms:.2} ms")),
            self.mtu.map_or_else(dash, |mtu| mtu.to_string()),
            self.bandwidth_bytes_per_s.map_or_else(dash, |rate| format!("{}/s", bytes(rate as u64))),
            self.certificate_days.map_or_else(dash, |days| format!("{days} d")),
        ]
    }
}

impl Report for StatusReport {
    fn text(&self) -> String {
        let mut text = format!(
            "cluster {}   head {}   version {}   member list {}   head's certificate: {} days",
            self.cluster, self.head, self.version, self.members_version, self.certificate_days
        );
        if self.members.is_empty() {
            text.push_str(
                "\n\nno workers yet: start `pp-run worker` on another machine, which prints what to run here",
            );
            return text;
        }
        let header =
            ["worker", "address", "state", "devices", "version", "free", "RTT", "MTU", "bandwidth", "certificate"];
        let rows: Vec<Vec<String>> = self.members.iter().map(Row::cells).collect();
        text.push_str(&format!("\n\n{}", table(5, &header, &rows)));
        for row in &self.members {
            for stage in &row.stages {
                let layers = layer_range(stage.layers);
                text.push_str(&format!(
                    "\n{}: stage {} (layers {layers}) on {}",
                    row.name, stage.index, stage.device_id
                ));
            }
            if let Some(error) = &row.error {
                text.push_str(&format!("\n{error}"));
            }
        }
        text
    }
}
