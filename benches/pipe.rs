//! Does the pipe work? Stages of one software-driver thread each, processes of their own over QUIC, against one such
//! process that holds everything: decode of several requests at once, and a prompt.
//!
//! Beside the ratio stand its two bounds: S(B), what such stages can reach by their costs, fitted on the one process; and
//! what two whole processes reach side by side, which is what the processor has to give. `cargo bench --bench pipe`
//! prints the table, and leaves it as JSON in target/pipe, with a trace of two stages and its picture.

#![expect(clippy::print_stdout, reason = "this is its program")]
#![expect(dead_code, reason = "tests need more of what they share with this")]

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use pp_engine::law::speedup;
use serde_json::{Value, json};

#[path = "../tests/it/cluster/processes.rs"]
mod processes;
#[path = "../tests/it/support.rs"]
mod support;

use processes::{Machine, Running, Worker};

/// Requests at once.
const LEVELS: [usize; 4] = [2, 4, 8, 16];
/// The level that is traced.
const TRACED: usize = 8;
/// Tokens of the prompt whose time counts.
const PROMPT: usize = 512;
/// Layers of SmolLM2 by stage. The last one has the LM head, which is worth eleven layers to a token that is drawn and
/// nothing to the others of a prompt: what is best for answers (`plan --max-sequences 8` takes it) is not for prompts.
const SPLITS: [&str; 3] = ["19,11", "15,15", "9,8,8,5"];
const CODE: &str = "stages-of-one-thread-on-the-loopback";

fn model() -> PathBuf {
    let folder = std::env::var("PP_MODELS").map(PathBuf::from).unwrap_or_else(|_| {
        PathBuf::from(std::env::var("HOME").expect("HOME is set")).join(".local/share/pp-run/models")
    });
    folder.join("SmolLM2-135M-Instruct.Q4_1.gguf")
}

/// A machine with the model, its driver held to one thread.
fn machine() -> Machine {
    let machine = Machine::new();
    machine.take_model(model().to_str().expect("a path in UTF-8"), "model.gguf");
    machine
}

fn program(machine: &Machine, arguments: &[&str]) -> Command {
    let mut command = machine.program(arguments);
    command.env("LP_NUM_THREADS", "1").env("PP_JOIN_CODE", CODE);
    command
}

/// The JSON that several programs print which run at the same time.
fn objects(mut programs: Vec<Command>) -> Vec<Value> {
    let start = |command: &mut Command| command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn();
    let children: Vec<_> = programs.iter_mut().map(|command| start(command).expect("the program starts")).collect();
    let outputs = children.into_iter().map(|child| child.wait_with_output().expect("it ends"));
    let object = |output: std::process::Output| {
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        serde_json::from_slice(&output.stdout).expect("JSON")
    };
    outputs.map(object).collect()
}

/// Tokens per second: decode at each level, and of the prompt; not a number where that is not known.
#[derive(Clone, Debug, Default)]
struct Rates {
    decode: Vec<f64>,
    prefill: f64,
}

impl Rates {
    /// Of `heads` that run side by side, together; `stages` says where.
    fn of(heads: &[&Machine], stages: &[&str], trace: Option<&Path>) -> Rates {
        let bench = |more: &[&str]| -> Vec<Value> {
            let arguments = [&["bench", "-m", "model", "--json"], stages, more].concat();
            objects(heads.iter().map(|head| program(head, &arguments)).collect())
        };
        let together = |found: &[Value], path: &str| -> f64 {
            found.iter().map(|report| report.pointer(path).and_then(Value::as_f64).expect("a rate")).sum()
        };
        let mut rates = Rates::default();
        for level in LEVELS {
            let level_text = level.to_string();
            let usual = ["--concurrency", &level_text, "--prompt-tokens", "32", "--gen-tokens", "24", "--reps", "2"];
            let trace = trace.filter(|_| level == TRACED).map(|path| ["--trace", path.to_str().expect("UTF-8")]);
            let found = bench(&[&usual[..], trace.as_ref().map_or(&[], |trace| &trace[..])].concat());
            rates.decode.push(together(&found, "/concurrency/0/decode_tokens_per_s/median"));
        }
        let prompt = PROMPT.to_string();
        let found = bench(&["--prompt-tokens", &prompt, "--gen-tokens", "1", "--reps", "2", "--no-roofline"]);
        rates.prefill = together(&found, "/prefill_tokens_per_s/median");
        rates
    }

    fn over(&self, other: &Rates) -> Rates {
        let decode = self.decode.iter().zip(&other.decode).map(|(a, b)| a / b).collect();
        Rates { decode, prefill: self.prefill / other.prefill }
    }

    fn row(&self, name: &str, digits: usize) -> String {
        let decode: String = self.decode.iter().map(|rate| format!("{rate:>9.digits$}")).collect();
        let prefill = if self.prefill.is_nan() { String::new() } else { format!("{:>12.digits$}", self.prefill) };
        format!("{name:<44}{decode}{prefill}")
    }

    fn json(&self) -> Value {
        let decode: serde_json::Map<String, Value> =
            LEVELS.iter().zip(&self.decode).map(|(level, rate)| (level.to_string(), json!(rate))).collect();
        json!({ "decode": decode, "prefill": self.prefill })
    }
}

/// S(B) of `stages`, by what the one process of a trace is fitted to cost.
fn speedups(machine: &Machine, trace: &Path, stages: usize) -> Vec<f64> {
    let found = machine.object(&["trace", trace.to_str().expect("UTF-8")]);
    let cost = |name: &str| found["stages"][0][name].as_f64().expect("a cost");
    LEVELS.iter().map(|level| speedup(cost("alpha"), cost("beta"), stages, *level as f64)).collect()
}

/// A head and workers, which give their software device.
fn cluster(names: &[&str]) -> (Machine, Vec<(Machine, Worker)>) {
    let head = machine();
    head.object(&["cluster", "init"]);
    let start = |name: &&str| {
        let machine = machine();
        let mut command = program(&machine, &["worker", "--json", "--name", name, "--listen", "127.0.0.1:0"]);
        let mut worker = Worker(Running::start(&mut command));
        let invitation = worker.invitation();
        let arguments: Vec<&str> = invitation.iter().map(String::as_str).collect();
        objects(vec![program(&head, &[&arguments, &["--json"][..]].concat())]);
        worker.ready();
        (machine, worker)
    };
    let workers = names.iter().map(start).collect();
    (head, workers)
}

fn main() {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).with_file_name("pipe");
    std::fs::create_dir_all(&folder).expect("room for what is found");
    let trace = |name: &str| folder.join(name);
    let names = ["rig2", "rig3", "rig4"];
    let (head, workers) = cluster(&names);
    println!("tokens/s, one driver thread a process; decode of so many requests at once, prefill of {PROMPT}");
    let levels: String = LEVELS.iter().map(|level| format!("{level:>9}")).collect();
    println!("{:<44}{levels}{:>12}", "", "prefill");
    let told = |name: &str, rates: Rates| {
        println!("{}", rates.row(name, 1));
        rates
    };
    let one = told("one process", Rates::of(&[&head], &[], Some(&trace("one.json"))));
    let other = machine();
    let both = told("two whole processes side by side", Rates::of(&[&head, &other], &[], None));
    let piped = |split: &&'static str| {
        let stages = split.split(',').count();
        let workers = names[..stages - 1].join(",");
        let arguments = ["--split", split, "--workers", &workers];
        let rates = Rates::of(&[&head], &arguments, Some(&trace(&format!("{split}.json"))));
        (*split, told(&format!("{stages} stages in processes, {split}"), rates))
    };
    let piped: Vec<(&str, Rates)> = SPLITS.iter().map(piped).collect();
    println!("\nagainst one process");
    println!("{}", both.over(&one).row("two whole processes: the processor's bound", 2));
    for (split, rates) in &piped {
        println!("{}", rates.over(&one).row(split, 2));
    }
    let splits: serde_json::Map<String, Value> =
        piped.iter().map(|(split, rates)| ((*split).to_owned(), rates.json())).collect();
    let mut report = json!({ "levels": LEVELS, "prompt_tokens": PROMPT,
        "tokens_per_s": { "one": one.json(), "two_whole": both.json(), "splits": splits } });
    let law = Rates { decode: speedups(&head, &trace("one.json"), 2), prefill: f64::NAN };
    println!("{}", law.row("S(B) of two stages, by one process's costs", 2));
    report["speedup_by_law"] = law.json()["decode"].take();
    std::fs::write(folder.join("pipe.json"), format!("{report:#}\n")).expect("room for the table");
    let picture = folder.join("two.svg");
    let two = trace(&format!("{}.json", SPLITS[0]));
    head.object(&["trace", two.to_str().expect("UTF-8"), "--svg", picture.to_str().expect("UTF-8")]);
    println!("\npipe.json, the traces and a picture of two stages are in {}", folder.display());
    drop(workers);
}
