//! Machines as far as pp-run can tell: processes with homes of their own.

use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Output, Stdio};
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};

use serde_json::Value;

use crate::support::data;

/// How long anything may take that is waited for: much, as tests share few cores.
const PATIENCE: Duration = Duration::from_secs(120);
/// Lines shown of what a process said where its test failed.
const LINES_SHOWN: usize = 60;

/// A machine: a home with all that is in it.
pub struct Machine {
    home: tempfile::TempDir,
    /// The network namespace that its programs run in, where it has its own.
    namespace: Option<String>,
}

impl Machine {
    /// With an empty home.
    pub fn new() -> Machine {
        Machine::at(None)
    }

    /// As [`Machine::new`], in a network namespace.
    pub fn at(namespace: Option<String>) -> Machine {
        let machine = Machine { home: tempfile::tempdir().expect("a folder"), namespace };
        std::fs::create_dir_all(machine.models()).expect("room");
        machine
    }

    /// The program on this machine; nothing on stdin.
    pub fn program(&self, arguments: &[&str]) -> Command {
        let binary = env!("CARGO_BIN_EXE_pp-run");
        let mut command = match &self.namespace {
            Some(namespace) => {
                let mut command = Command::new("ip");
                command.args(["netns", "exec", namespace, binary]);
                command
            }
            None => Command::new(binary),
        };
        command.args(arguments).stdin(Stdio::null()).env("HOME", self.home.path());
        for name in ["PP_MODEL", "PP_MODELS", "PP_LOG", "PP_CHECKED", "PP_JOIN_CODE", "HF_HOME", "HF_HUB_CACHE"] {
            command.env_remove(name);
        }
        for (name, folder) in [("XDG_CONFIG_HOME", "config"), ("XDG_DATA_HOME", "data"), ("XDG_CACHE_HOME", "cache")] {
            command.env(name, self.home.path().join(folder));
        }
        command
    }

    /// What came of it.
    pub fn run(&self, arguments: &[&str]) -> Output {
        self.program(arguments).output().expect("the program starts")
    }

    /// Its JSON; it succeeds.
    #[track_caller]
    pub fn object(&self, arguments: &[&str]) -> Value {
        let output = self.run(&[arguments, &["--json"]].concat());
        let told = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{arguments:?}: {}\n{told}", output.status);
        serde_json::from_slice(&output.stdout).unwrap_or_else(|e| panic!("{arguments:?}: {e}\n{told}"))
    }

    /// It fails with this exit code; returns what it says.
    #[track_caller]
    pub fn refused(&self, arguments: &[&str], code: i32) -> String {
        let output = self.run(arguments);
        let told = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(code), "{arguments:?}: {told}");
        told
    }

    /// Its home.
    pub fn home(&self) -> &Path {
        self.home.path()
    }

    /// Its models folder.
    pub fn models(&self) -> PathBuf {
        self.home.path().join("data/pp-run/models")
    }

    /// Where tensors from other machines are.
    pub fn tensors(&self) -> PathBuf {
        self.home.path().join("cache/pp-run/tensors")
    }

    /// Where its identity is.
    pub fn cluster(&self) -> PathBuf {
        self.home.path().join("config/pp-run/cluster")
    }

    /// Where a member of its cluster listens.
    #[track_caller]
    pub fn address_of(&self, name: &str) -> String {
        let status = self.object(&["cluster", "status", "--no-bandwidth"]);
        let members = status["members"].as_array().expect("members");
        let member = members.iter().find(|member| member["name"] == name).expect("it is in the cluster");
        member["address"].as_str().expect("a text").to_owned()
    }

    /// A model of tests/data in its models folder, under another name.
    pub fn take_model(&self, model: &str, name: &str) {
        std::os::unix::fs::symlink(data(model), self.models().join(name)).expect("room for a link");
    }

    /// Starts a worker here, on a free port of the loopback unless `listen` says which; `more` is added to its arguments.
    pub fn worker(&self, name: &str, listen: Option<&str>, more: &[&str], environment: &[(&str, &str)]) -> Worker {
        self.start_worker(name, listen, &[&["--device", "reference"], more].concat(), environment)
    }

    /// The same with the adapter that is there, of which it uses one thread where it is a software one.
    pub fn worker_on_device(&self, name: &str, listen: Option<&str>) -> Worker {
        self.start_worker(name, listen, &[], &[("LP_NUM_THREADS", "1")])
    }

    fn start_worker(&self, name: &str, listen: Option<&str>, more: &[&str], environment: &[(&str, &str)]) -> Worker {
        let listen = listen.unwrap_or("127.0.0.1:0");
        let usual = ["worker", "--json", "--name", name, "--listen", listen];
        let mut command = self.program(&[&usual, more].concat());
        Worker::start(command.envs(environment.iter().copied()))
    }
}

/// A process that runs beside the test, and is killed with this.
pub struct Running {
    child: Child,
    out: Said,
    err: Said,
}

impl Running {
    /// Starts it.
    pub fn start(command: &mut Command) -> Running {
        let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("the program starts");
        let out = Said::of(child.stdout.take().expect("piped"));
        let err = Said::of(child.stderr.take().expect("piped"));
        Running { child, out, err }
    }

    /// Its stdin, where that was a pipe.
    pub fn stdin(&mut self) -> ChildStdin {
        self.child.stdin.take().expect("piped, and taken once")
    }

    /// Its process.
    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// Sends it a signal, by name as `kill` has it.
    pub fn signal(&self, name: &str) {
        let id = self.child.id().to_string();
        let sent = Command::new("kill").args(["-s", name, &id]).status().expect("kill is there");
        assert!(sent.success(), "kill -s {name} {id}");
    }

    /// The exit code, once it ends by itself; none where a signal ended it.
    pub fn end(mut self) -> (Option<i32>, String) {
        let until = Instant::now() + PATIENCE;
        while Instant::now() < until {
            if let Some(status) = self.child.try_wait().expect("a child") {
                return (status.code(), self.err.all());
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        panic!("process {} does not end:\n{}", self.child.id(), self.err.all());
    }

    /// The first line on stderr with `word` in it, once it is there.
    #[track_caller]
    pub fn says(&mut self, word: &str) -> String {
        self.err.line(word, &mut self.child)
    }

    /// The `times`th line on stderr with `word` in it, once it is there.
    #[track_caller]
    pub fn says_times(&mut self, word: &str, times: usize) -> String {
        self.err.nth_line(word, times - 1, &mut self.child)
    }

    /// The first line on stdout with `word` in it, once it is there.
    #[track_caller]
    pub fn prints(&mut self, word: &str) -> String {
        self.out.line(word, &mut self.child)
    }

    /// All that it has said on stderr so far.
    pub fn said(&self) -> String {
        self.err.all()
    }
}

impl Drop for Running {
    #[expect(clippy::print_stdout, reason = "shown with what the test said, and only where it failed")]
    fn drop(&mut self) {
        let ended = self.child.try_wait();
        let _ = self.child.kill();
        let _ = self.child.wait();
        if std::thread::panicking() {
            let ended =
                ended.ok().flatten().map_or_else(|| "was running".to_owned(), |status| format!("had ended, {status}"));
            let said = self.err.all();
            let latest: Vec<&str> = said.lines().rev().take(LINES_SHOWN).collect();
            let latest: Vec<&str> = latest.into_iter().rev().collect();
            println!("process {} {ended}; it said at last:\n{}", self.child.id(), latest.join("\n"));
        }
    }
}

/// A worker that runs.
pub struct Worker(pub Running);

impl Worker {
    fn start(command: &mut Command) -> Worker {
        Worker(Running::start(command))
    }

    /// What it prints for the head, as arguments; it is in no cluster yet.
    #[track_caller]
    pub fn invitation(&mut self) -> Vec<String> {
        let line = self.0.says("pp-run cluster add ");
        line.split_whitespace().skip(1).map(str::to_owned).collect()
    }

    /// What it says when it serves.
    #[track_caller]
    pub fn ready(&mut self) -> Value {
        let line = self.0.prints("{");
        serde_json::from_str(&line).unwrap_or_else(|e| panic!("{e}: {line}"))
    }
}

/// Lines that have come, and whether no more will.
type Lines = (Vec<String>, bool);

/// Lines that come.
#[derive(Clone)]
struct Said(Arc<(Mutex<Lines>, Condvar)>);

impl Said {
    fn of(pipe: impl Read + Send + 'static) -> Said {
        let said = Said(Arc::new((Mutex::new((Vec::new(), false)), Condvar::new())));
        let (reads, lines) = (said.clone(), BufReader::new(pipe).lines());
        std::thread::spawn(move || {
            for line in lines.map_while(Result::ok) {
                reads.0.0.lock().unwrap().0.push(line);
                reads.0.1.notify_all();
            }
            reads.0.0.lock().unwrap().1 = true;
            reads.0.1.notify_all();
        });
        said
    }

    #[track_caller]
    fn line(&self, word: &str, child: &mut Child) -> String {
        self.nth_line(word, 0, child)
    }

    #[track_caller]
    fn nth_line(&self, word: &str, before: usize, child: &mut Child) -> String {
        let until = Instant::now() + PATIENCE;
        let mut said = self.0.0.lock().unwrap();
        loop {
            if let Some(line) = said.0.iter().filter(|line| line.contains(word)).nth(before) {
                return line.clone();
            }
            let left = until.saturating_duration_since(Instant::now());
            assert!(!said.1 && !left.is_zero(), "{word:?} is not said; {:?}:\n{}", child.try_wait(), said.0.join("\n"));
            said = self.0.1.wait_timeout(said, left).unwrap().0;
        }
    }

    /// All of it, once the pipe is closed or nothing has come for a moment.
    fn all(&self) -> String {
        let said = self.0.0.lock().unwrap();
        let said = self.0.1.wait_timeout_while(said, Duration::from_millis(500), |(_, closed)| !*closed).unwrap().0;
        said.0.join("\n")
    }
}

/// A cluster of a head and workers that serve, each with a copy of a model (of tests/data) or without.
pub struct Cluster {
    pub head: Machine,
    pub workers: Vec<(Machine, Worker)>,
}

impl Cluster {
    /// Begins it and enrols workers of these names.
    #[track_caller]
    pub fn of(names: &[&str], model: &str) -> Cluster {
        Cluster::begun(names, Some(model), &[], &[])
    }

    /// The same without the model; `more` is added to the workers' arguments.
    #[track_caller]
    pub fn without_model(names: &[&str], more: &[&str]) -> Cluster {
        Cluster::begun(names, None, more, &[])
    }

    /// The same with workers that log.
    #[track_caller]
    pub fn logging(names: &[&str], filter: &str) -> Cluster {
        Cluster::begun(names, None, &[], &[("PP_LOG", filter), ("NO_COLOR", "1")])
    }

    /// With a copy of a file, and workers that have the machine's adapter.
    #[track_caller]
    pub fn on_devices(names: &[&str], model: &Path) -> Cluster {
        Cluster::enrolled(names, |name| {
            let machine = Machine::new();
            std::os::unix::fs::symlink(model, machine.models().join("renamed.gguf")).expect("room for a link");
            let worker = machine.worker_on_device(name, None);
            (machine, worker)
        })
    }

    #[track_caller]
    fn begun(names: &[&str], model: Option<&str>, more: &[&str], environment: &[(&str, &str)]) -> Cluster {
        Cluster::enrolled(names, |name| {
            let machine = Machine::new();
            model.iter().for_each(|model| machine.take_model(model, "renamed"));
            let worker = machine.worker(name, None, more, environment);
            (machine, worker)
        })
    }

    #[track_caller]
    fn enrolled(names: &[&str], start: impl Fn(&str) -> (Machine, Worker)) -> Cluster {
        let head = Machine::new();
        head.object(&["cluster", "init"]);
        let mut workers: Vec<(Machine, Worker)> = names.iter().map(|name| start(name)).collect();
        for (_, worker) in &mut workers {
            let invitation = worker.invitation();
            head.object(&invitation.iter().map(String::as_str).collect::<Vec<_>>());
            worker.ready();
        }
        Cluster { head, workers }
    }
}

/// Permissions of a file or folder.
pub fn mode(path: &Path) -> u32 {
    use std::os::unix::fs::PermissionsExt;
    std::fs::metadata(path).unwrap_or_else(|e| panic!("{}: {e}", path.display())).permissions().mode() & 0o777
}
