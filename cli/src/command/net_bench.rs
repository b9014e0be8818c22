//! What a hop between two hosts costs, over QUIC as a pipeline has it and over what else there is, beside each other.

pub mod ends;
mod networks;
mod relay;

use std::io::{BufRead, BufReader, Read};
use std::path::PathBuf;
use std::process::{Child, Command, ExitCode, Stdio};
use std::sync::atomic::Ordering;
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use pp_engine::cluster::control::Purpose;
use pp_engine::cluster::remote::Worker;
use pp_transport::identity::store::Head;
use pp_transport::identity::{Authority, Identity, Key, PeerName, Role, Store, UnixTime};
use pp_transport::measure::Effort;
use pp_transport::members::{Member, Members, SignedMembers};
use serde::{Deserialize, Serialize};

use crate::args::{NetBenchArgs, NetworkArg, TransportArg};
use crate::cluster::gather::DIAL;
use crate::cluster::{Here, LOCK, lease_error, typed_name};
use crate::output::progress::Steps;
use crate::output::{Out, Report, table};
use crate::{cancel, errors};
use networks::{ADDRESSES, Namespaces};
use relay::Weather;

/// What the end that serves is called.
const OTHER_END: &str = "there";
const SIZES: [usize; 5] = [64, 8 << 10, 64 << 10, 1 << 20, 32 << 20];
/// Over networks that lose, the largest would take minutes.
const RELAY_SIZES: [usize; 3] = [8 << 10, 64 << 10, 1 << 20];
const TRANSPORTS: [TransportArg; 4] = [TransportArg::Local, TransportArg::Quic, TransportArg::Tcp, TransportArg::Tls];
/// How often somebody looks whether the user wants it to end.
const LOOK: Duration = Duration::from_millis(100);
/// How long an end may take to start.
const START: Duration = Duration::from_secs(20);
/// What a measurement takes beside the time that was asked for.
const MARGIN: Duration = Duration::from_secs(5);

/// Measures.
pub fn run(args: &NetBenchArgs) -> Result<ExitCode> {
    let out = Out::new(args.output.json, false);
    // From now on a Ctrl-C lets what was made be removed.
    cancel::flag();
    let rows = match &args.worker {
        Some(name) => to_worker(args, name)?,
        None => here(args, &out)?,
    };
    out.result(&NetReport { rows })?;
    Ok(ExitCode::SUCCESS)
}

/// What frames of one size cost; nothing where that was not measured.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct Cell {
    /// Of a frame's payload.
    bytes: usize,
    /// How many round trips.
    trips: usize,
    median_us: Option<f64>,
    /// What nineteen of twenty stay under.
    p95_us: Option<f64>,
    one_way_bytes_per_s: Option<f64>,
    /// Largest UDP payload that QUIC found to pass.
    mtu: Option<u16>,
    /// Why not.
    not_measured: Option<String>,
}

impl Cell {
    fn missing(bytes: usize, why: &str) -> Cell {
        Cell {
            bytes,
            trips: 0,
            median_us: None,
            p95_us: None,
            one_way_bytes_per_s: None,
            mtu: None,
            not_measured: Some(why.to_owned()),
        }
    }
}

/// A network to measure on.
#[derive(Clone, Debug, PartialEq)]
struct Network {
    kind: NetworkArg,
    /// Of a relay.
    weather: Option<(u32, f64)>,
}

impl Network {
    /// All that was asked for, each once.
    fn all(args: &NetBenchArgs) -> Vec<Network> {
        let mut all: Vec<Network> = Vec::new();
        for kind in &args.networks {
            let some = match kind {
                NetworkArg::Relay => args
                    .delays
                    .iter()
                    .flat_map(|delay| args.losses.iter().map(|loss| Some((*delay, *loss))))
                    .map(|weather| Network { kind: *kind, weather })
                    .collect(),
                _ => vec![Network { kind: *kind, weather: None }],
            };
            for network in some {
                if !all.contains(&network) {
                    all.push(network);
                }
            }
        }
        all
    }

    fn name(&self) -> &'static str {
        match self.kind {
            NetworkArg::Loopback => "loopback",
            NetworkArg::Veth => "veth",
            NetworkArg::Relay => "relay",
        }
    }

    fn sizes(&self, typed: &[usize]) -> Vec<usize> {
        let mut sizes = match (typed, self.kind) {
            ([], NetworkArg::Relay) => RELAY_SIZES.to_vec(),
            ([], _) => SIZES.to_vec(),
            _ => typed.to_vec(),
        };
        sizes.sort();
        sizes.dedup();
        sizes
    }

    fn transports(&self) -> &'static [TransportArg] {
        if self.kind == NetworkArg::Loopback { &TRANSPORTS } else { &TRANSPORTS[1..] }
    }

    /// Makes it, where it is to be made; in words why that cannot be.
    fn make(&self, seed: u64) -> Result<Option<Namespaces>, String> {
        match (self.kind, self.weather) {
            (NetworkArg::Loopback, _) => Ok(None),
            (_, None) => Namespaces::with_cable().map(Some),
            (_, Some((delay, percent))) => {
                let delay = Duration::from_millis(delay.into());
                Namespaces::with_relay(Weather { delay, loss: percent / 100.0, seed }).map(Some)
            }
        }
    }
}

fn name(transport: TransportArg) -> &'static str {
    match transport {
        TransportArg::Local => "local",
        TransportArg::Quic => "quic",
        TransportArg::Tcp => "tcp",
        TransportArg::Tls => "tls",
    }
}

fn here(args: &NetBenchArgs, out: &Out) -> Result<Vec<Row>> {
    let identities = identities()?;
    let networks = Network::all(args);
    let total = networks.iter().map(|network| network.transports().len()).sum();
    let mut steps = Steps::new(out, "network", "measurements");
    let mut rows: Vec<Row> = Vec::new();
    let mut done = 0;
    for network in &networks {
        let made = network.make(args.seed);
        let sizes = network.sizes(&args.sizes);
        for transport in network.transports() {
            steps.update(done, total);
            let cells = match &made {
                Ok(made) => {
                    let run = Measurement { args, folder: identities.path().to_owned(), sizes: &sizes };
                    run.cells(*transport, made.as_ref().map(Namespaces::names))?
                }
                Err(why) => sizes.iter().map(|bytes| Cell::missing(*bytes, why)).collect(),
            };
            rows.extend(cells.into_iter().map(|cell| Row {
                network: network.name().to_owned(),
                delay_ms: network.weather.map(|(delay, _)| delay),
                loss_percent: network.weather.map(|(_, loss)| loss),
                transport: name(*transport),
                cell,
            }));
            done += 1;
        }
    }
    steps.finish();
    Ok(rows)
}

/// Folders `head` and `worker` with identities of a cluster that is for this measurement only.
fn identities() -> Result<tempfile::TempDir> {
    let folder = tempfile::tempdir()?;
    let now = UnixTime::now();
    let authority = Authority::create(now)?;
    let identity = |role, name: &str| -> Result<(Key, Identity)> {
        let key = Key::generate()?;
        let peer = PeerName { cluster: authority.cluster(), role, name: name.parse()? };
        let certificate = authority.issue_now(key.public(), &peer, now)?;
        Ok((key.clone(), Identity::new(key, certificate, authority.certificate().clone())?))
    };
    let (_, head) = identity(Role::Head, "here")?;
    let (key, worker) = identity(Role::Worker, OTHER_END)?;
    let member = |identity: &Identity| Member {
        name: identity.name().name.clone(),
        role: identity.name().role,
        fingerprint: identity.fingerprint(),
        address: None,
        added: now.as_secs(),
    };
    let mut members = Members::founding(authority.cluster(), member(&head));
    let address = Some(format!("{}:1", ADDRESSES[1]).parse()?);
    members.add(Member { address, ..member(&worker) })?;
    let signed = SignedMembers::sign(&members, &authority)?;
    Store::new(folder.path().join("head")).lock(LOCK)?.put_head(&Head { authority, identity: head, members })?;
    let store = Store::new(folder.path().join("worker"));
    let lock = store.lock(LOCK)?;
    lock.put_worker_key(&key)?;
    lock.put_worker(&worker, &signed)?;
    Ok(folder)
}

/// What processes are started for.
struct Measurement<'a> {
    args: &'a NetBenchArgs,
    /// Of the identities.
    folder: PathBuf,
    sizes: &'a [usize],
}

impl Measurement<'_> {
    /// What every size costs, by two processes, each in its namespace.
    fn cells(&self, transport: TransportArg, namespaces: Option<&[String; 2]>) -> Result<Vec<Cell>> {
        let (mut cells, why) = match self.measure(transport, namespaces) {
            Ok(found) => found,
            Err(error) if is_cancelled() => return Err(error),
            Err(error) => (Vec::new(), Some(format!("{error:#}"))),
        };
        let why = why.unwrap_or_else(|| "an end has ended early".to_owned());
        cells.extend(self.sizes[cells.len()..].iter().map(|bytes| Cell::missing(*bytes, &why)));
        Ok(cells)
    }

    /// What was found, and why there is no more.
    fn measure(
        &self,
        transport: TransportArg,
        namespaces: Option<&[String; 2]>,
    ) -> Result<(Vec<Cell>, Option<String>)> {
        let at = if namespaces.is_some() { ADDRESSES[1] } else { "127.0.0.1" };
        let namespace = |end: usize| namespaces.map(|names| names[end].as_str());
        // What goes through memory has both ends in one process.
        let server = if transport == TransportArg::Local {
            None
        } else {
            let mut server = self.start("worker", transport, namespace(1), &["--listen", &format!("{at}:0")])?;
            let said = server.line(START)?.map_err(|why| anyhow::anyhow!(why))?;
            Some((serde_json::from_str::<ends::Serving>(&said)?.address, server))
        };
        let to = server.as_ref().map_or_else(|| "127.0.0.1:9".to_owned(), |(address, _)| address.to_string());
        let (reps, seconds) = (self.args.reps.to_string(), self.args.seconds.to_string());
        let more = ["--to", &to, "--reps", &reps, "--seconds", &seconds];
        let mut client = self.start("head", transport, namespace(0), &more)?;
        let mut cells: Vec<Cell> = Vec::new();
        let asked = Duration::from_secs_f64(2.0 * self.args.seconds) + MARGIN;
        let patience = asked.max(Duration::from_secs_f64(self.args.patience));
        while cells.len() < self.sizes.len() {
            match client.line(patience)? {
                Ok(line) => cells.push(serde_json::from_str(&line)?),
                Err(why) => return Ok((cells, Some(why))),
            }
        }
        Ok((cells, None))
    }

    fn start(&self, role: &str, transport: TransportArg, namespace: Option<&str>, more: &[&str]) -> Result<Running> {
        let program = std::env::current_exe().context("where this program is")?;
        let mut command = match namespace {
            Some(namespace) => {
                let mut command = Command::new("ip");
                command.args(["netns", "exec", namespace]).arg(program);
                command
            }
            None => Command::new(program),
        };
        let sizes = self.sizes.iter().map(ToString::to_string).collect::<Vec<_>>().join(",");
        command.args(["net-bench-end", "--transport", name(transport), "--sizes", &sizes, "--folder"]);
        command.arg(self.folder.join(role)).args(more);
        Running::start(&mut command)
    }
}

fn is_cancelled() -> bool {
    cancel::flag().load(Ordering::Relaxed)
}

/// A process that is ended with this.
struct Running {
    child: Child,
    lines: Receiver<String>,
}

impl Running {
    fn start(command: &mut Command) -> Result<Running> {
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn()?;
        let (tell, lines) = channel();
        let said = child.stdout.take().context("a pipe")?;
        std::thread::spawn(move || {
            for line in BufReader::new(said).lines().map_while(Result::ok) {
                let _ = tell.send(line);
            }
        });
        Ok(Running { child, lines })
    }

    /// The next line that it prints; in words why none comes. An error when the user wants it to end.
    fn line(&mut self, patience: Duration) -> Result<Result<String, String>> {
        let until = Instant::now() + patience;
        loop {
            if is_cancelled() {
                return Err(errors::cancelled());
            }
            match self.lines.recv_timeout(LOOK) {
                Ok(line) => return Ok(Ok(line)),
                Err(RecvTimeoutError::Disconnected) => return Ok(Err(self.last_words())),
                Err(RecvTimeoutError::Timeout) if Instant::now() < until => {}
                Err(RecvTimeoutError::Timeout) => {
                    return Ok(Err(format!("took longer than {:.0} s", patience.as_secs_f64())));
                }
            }
        }
    }

    fn last_words(&mut self) -> String {
        let mut said = String::new();
        if let Some(stderr) = self.child.stderr.take() {
            let _ = stderr.take(1 << 16).read_to_string(&mut said);
        }
        let last = said.lines().last().unwrap_or("an end has ended without a word");
        last.trim_start_matches("pp-run: error: ").to_owned()
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The way to a worker of this head's cluster.
fn to_worker(args: &NetBenchArgs, typed: &str) -> Result<Vec<Row>> {
    let here = Here::open()?;
    let member = here.worker(&typed_name(typed)?)?;
    let node = here.node()?;
    let worker = Worker::connect(&node, member, &here.greeting(), Purpose::Look, DIAL).map_err(lease_error)?;
    here.freshen(&worker)?;
    let sizes = Network { kind: NetworkArg::Loopback, weather: None }.sizes(&args.sizes);
    let largest = sizes.iter().copied().max().unwrap_or(0).max(ends::WARM_BYTES);
    let mut port = worker.measure(largest).map_err(lease_error)?;
    let effort = Effort { trips: args.reps, time: Duration::from_secs_f64(args.seconds) };
    ends::warm(port.as_mut(), effort)?;
    let one = |bytes: usize| -> Result<Row> {
        if is_cancelled() {
            return Err(errors::cancelled());
        }
        let cell = Cell { mtu: Some(worker.mtu()), ..ends::cell(port.as_mut(), bytes, effort)? };
        let network = format!("to {typed}");
        Ok(Row { network, delay_ms: None, loss_percent: None, transport: "quic", cell })
    };
    sizes.into_iter().map(one).collect()
}

#[derive(Debug, Serialize)]
struct NetReport {
    rows: Vec<Row>,
}

#[derive(Debug, Serialize)]
struct Row {
    /// `loopback`, `veth`, `relay`, or to which worker.
    network: String,
    /// Added each way by a relay.
    delay_ms: Option<u32>,
    loss_percent: Option<f64>,
    /// `local`, `quic`, `tcp` or `tls`.
    transport: &'static str,
    #[serde(flatten)]
    cell: Cell,
}

impl Row {
    fn place(&self) -> String {
        match (self.delay_ms, self.loss_percent) {
            (Some(delay), Some(loss)) => format!("relay: {delay} ms added each way, {loss} % lost, MTU 1500"),
            _ if self.network == "veth" => "veth, MTU 1500".to_owned(),
            _ => self.network.clone(),
        }
    }
}

impl Report for NetReport {
    fn text(&self) -> String {
        let mut places: Vec<String> = self.rows.iter().map(Row::place).collect();
        places.dedup();
        let one = |place: &String| {
            let rows: Vec<&Row> = self.rows.iter().filter(|row| row.place() == *place).collect();
            format!("{place}\n{}", place_text(&rows))
        };
        let what = "there and back in µs: median (what 19 of 20 stay under); MB/s one way";
        format!("{what}\n\n{}", places.iter().map(one).collect::<Vec<_>>().join("\n\n"))
    }
}

/// The rows of one network, a line a size.
fn place_text(rows: &[&Row]) -> String {
    let mut why: Vec<(&str, &str)> =
        rows.iter().filter_map(|row| Some((row.transport, row.cell.not_measured.as_deref()?))).collect();
    why.dedup();
    if rows.iter().all(|row| row.cell.not_measured.is_some()) {
        return format!("not measured: {}", why.first().map_or("", |(_, why)| why));
    }
    let mut transports: Vec<&str> = rows.iter().map(|row| row.transport).collect();
    transports.dedup();
    let mut sizes: Vec<usize> = rows.iter().map(|row| row.cell.bytes).collect();
    sizes.sort();
    sizes.dedup();
    let titles = |unit: &str| transports.iter().map(|name| format!("{name} {unit}")).collect::<Vec<_>>();
    let header = [vec!["frame".to_owned()], titles("µs"), titles("MB/s"), vec!["quic/tls".to_owned()]].concat();
    let header: Vec<&str> = header.iter().map(String::as_str).collect();
    let line = |bytes: &usize| {
        let find = |name: &str| rows.iter().find(|row| row.transport == name && row.cell.bytes == *bytes);
        let cell = |name: &&str| find(name).map(|row| &row.cell);
        let time = |name: &&str| {
            let both = cell(name).and_then(|cell| cell.median_us.zip(cell.p95_us));
            both.map_or("-".to_owned(), |(median, p95)| format!("{median:.0} ({p95:.0})"))
        };
        let rate = |name: &&str| {
            let rate = cell(name).and_then(|cell| cell.one_way_bytes_per_s);
            rate.map_or("-".to_owned(), |rate| format!("{:.*}", if rate < 1e7 { 2 } else { 0 }, rate / 1e6))
        };
        let ratio = |of: fn(&Cell) -> Option<f64>| Some(of(cell(&"quic")?)? / of(cell(&"tls")?)?);
        let ratios = ratio(|cell| cell.median_us).zip(ratio(|cell| cell.one_way_bytes_per_s));
        let ratios = ratios.map_or("-".to_owned(), |(time, rate)| format!("{time:.2}, {rate:.2}"));
        let cells = [
            vec![size(*bytes)],
            transports.iter().map(time).collect(),
            transports.iter().map(rate).collect(),
            vec![ratios],
        ];
        cells.concat()
    };
    let mut text = table(1, &header, &sizes.iter().map(line).collect::<Vec<_>>());
    for (transport, why) in why {
        text.push_str(&format!("\n{transport} not measured: {why}"));
    }
    text
}

/// As it is typed.
fn size(bytes: usize) -> String {
    match bytes {
        _ if bytes.is_multiple_of(1 << 20) => format!("{}M", bytes >> 20),
        _ if bytes.is_multiple_of(1 << 10) => format!("{}K", bytes >> 10),
        _ => bytes.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(transport: &'static str, bytes: usize, median: f64, rate: f64) -> Row {
        let cell = Cell {
            trips: 9,
            median_us: Some(median),
            p95_us: Some(2.0 * median),
            one_way_bytes_per_s: Some(rate),
            not_measured: None,
            ..Cell::missing(bytes, "")
        };
        Row { network: "veth".to_owned(), delay_ms: None, loss_percent: None, transport, cell }
    }

    #[test]
    fn a_line_has_all_transports_and_what_is_missing_says_why() {
        let mut rows = vec![row("quic", 8192, 50.0, 4e8), row("quic", 64, 20.0, 2e6), row("tls", 8192, 40.0, 8e8)];
        rows.push(Row { cell: Cell::missing(64, "took longer than 1 s"), ..row("tls", 64, 0.0, 0.0) });
        let text = NetReport { rows }.text();
        assert!(text.contains("veth, MTU 1500\nframe"), "{text}");
        for line in
            ["8K     50 (100)  40 (80)        400       800  1.25, 0.50", "tls not measured: took longer than 1 s"]
        {
            assert!(text.contains(line), "{line:?} in\n{text}");
        }
        let small = text.lines().find(|line| line.starts_with("64 ")).expect("a line");
        assert!(small.contains("20 (40)") && small.contains("2.00") && small.ends_with('-'), "{small}");
    }

    #[test]
    fn a_network_that_is_not_there_is_one_line() {
        let missing = |bytes| Row { cell: Cell::missing(bytes, "needs root"), ..row("quic", bytes, 0.0, 0.0) };
        let rows = vec![missing(64), missing(128)];
        assert!(NetReport { rows }.text().ends_with("veth, MTU 1500\nnot measured: needs root"));
    }

    #[test]
    fn an_end_that_says_nothing_is_given_up_and_one_that_fails_says_why() {
        let mut silent = Running::start(Command::new("sleep").arg("60")).unwrap();
        let told = silent.line(Duration::from_millis(1)).unwrap().unwrap_err();
        assert!(told.starts_with("took longer than"), "{told}");
        let script = "echo one; echo two >&2; echo 'pp-run: error: three' >&2; exit 1";
        let mut failing = Running::start(Command::new("sh").args(["-c", script])).unwrap();
        let long = Duration::from_secs(60);
        assert_eq!(failing.line(long).unwrap(), Ok("one".to_owned()));
        assert_eq!(failing.line(long).unwrap(), Err("three".to_owned()));
    }

    #[test]
    fn sizes_are_written_as_they_are_typed() {
        assert_eq!([64, 8192, 1 << 20, 1500].map(size), ["64", "8K", "1M", "1500"]);
    }
}
