//! A conversation over workers, one of which vanishes: what is said then, and that it goes on.

use std::io::Write;
use std::path::Path;
use std::process::Stdio;

use serde_json::Value;

use super::processes::{Cluster, Machine, Running};
use crate::support::data;
use crate::terminal::{CTRL_D, Terminal};

/// Three layers.
const MODEL: &str = "tiny/llama-linear-rope";

fn talk(head: &Machine, more: &[&str]) -> Terminal {
    let model = data(MODEL);
    let usual = ["chat", "-m", model.to_str().expect("UTF-8"), "--device", "reference", "--split", "1,1,1"];
    let folder = |name: &str| head.home().join(name).to_str().expect("UTF-8").to_owned();
    let places = [("XDG_CONFIG_HOME", "config"), ("XDG_DATA_HOME", "data"), ("XDG_CACHE_HOME", "cache")];
    let places: Vec<(&str, String)> = places.iter().map(|(name, at)| (*name, folder(at))).collect();
    let places: Vec<(&str, &str)> = places.iter().map(|(name, at)| (*name, at.as_str())).collect();
    let sampling = ["--activations", "f32", "-n", "8", "-t", "0.9", "--seed", "5", "--wait", "1"];
    let terminal = Terminal::start(&[&usual[..], &sampling, more].concat(), head.home(), &places);
    terminal.see("/help lists commands", 1);
    terminal
}

fn contents(file: &Path) -> Vec<String> {
    let value: Value = serde_json::from_slice(&std::fs::read(file).expect("it was written")).expect("JSON");
    let messages = value["messages"].as_array().expect("an array").iter();
    messages.map(|message| message["content"].as_str().expect("a text").to_owned()).collect()
}

#[track_caller]
fn saved(terminal: &Terminal, head: &Machine, name: &str) -> Vec<String> {
    terminal.line(&format!("/save {name}"));
    terminal.see(&format!("messages written to {name}"), 1);
    contents(&head.home().join(name))
}

#[test]
fn a_conversation_outlives_its_pipeline() {
    let mut cluster = Cluster::of(&["rig2", "rig3"], MODEL);
    let alone = talk(&cluster.head, &[]);
    for (turn, message) in ["run of a stage", "and again", "and a third"].iter().enumerate() {
        alone.line(message);
        alone.see("first after", turn + 1);
    }
    let expected = saved(&alone, &cluster.head, "alone.json");
    alone.keys(CTRL_D);
    assert_eq!(alone.end().0, 0);

    let status = cluster.head.object(&["cluster", "status", "--no-bandwidth"]);
    let members = status["members"].as_array().expect("an array");
    let rig3 = members.iter().find(|member| member["name"] == "rig3").expect("a member");
    let address = rig3["address"].as_str().expect("an address").to_owned();

    let terminal = talk(&cluster.head, &["--workers", "rig2,rig3", "--no-recover"]);
    terminal.line("run of a stage");
    terminal.see("first after", 1);
    terminal.line("/stages");
    let text = terminal.see("one conversation fills 1/3 of the pipe", 1);
    assert!(text.contains("rig2: ") && text.contains("rig3: "), "{text}");
    let (machine, worker) = cluster.workers.pop().expect("two workers");
    worker.0.signal("KILL");
    drop(worker);
    terminal.line("and again");
    // Which stage, why, and what becomes of the message.
    terminal.see("/retry asks again", 1);
    // Why it was not comes behind that.
    let text = terminal.see("a worker is missing", 1);
    assert!(text.contains("stage 2 on rig3") && text.contains("rig3 is lost"), "{text}");
    assert!(text.contains("the pipeline is opened again"), "{text}");
    terminal.line("/stages");
    terminal.see("the pipeline is down", 1);
    let mut worker = machine.worker("rig3", Some(&address), &[], &[]);
    worker.ready();
    terminal.line("/retry");
    terminal.see("first after", 2);
    terminal.line("and a third");
    let text = terminal.see("first after", 3);
    assert_eq!(saved(&terminal, &cluster.head, "cluster.json"), expected, "{text}");
    terminal.keys(CTRL_D);
    assert_eq!(terminal.end().0, 0);
}

/// A turn whose pipeline became another one says so, and answers as the others do; where nobody was asked meanwhile the layers move
/// with the next message.
#[test]
fn a_turn_says_what_was_recovered_meanwhile() {
    let cluster = Cluster::of(&["rig2", "rig3"], MODEL);
    let model = data(MODEL);
    let usual = ["chat", "--json", "-m", model.to_str().expect("UTF-8"), "--device", "reference", "--split", "1,1,1"];
    let sampling = ["--activations", "f32", "-n", "8", "-t", "0.9", "--seed", "5"];
    let turns = |more: &[&str], between: &dyn Fn(&mut Running)| {
        let mut command = cluster.head.program(&[&usual[..], &sampling, more].concat());
        let mut chat = Running::start(command.stdin(Stdio::piped()));
        let mut stdin = chat.stdin();
        let mut turn = |chat: &mut Running, message: &str, mark: &str| -> Value {
            writeln!(stdin, "{message}").expect("it reads");
            serde_json::from_str(&chat.prints(mark)).expect("JSON")
        };
        let first = turn(&mut chat, "run of a stage", "\"turn\":1");
        between(&mut chat);
        let second = turn(&mut chat, "and again", "\"turn\":2");
        drop(stdin);
        assert_eq!(chat.end().0, Some(0));
        [first, second]
    };
    let alone = turns(&[], &|_| {});
    let moved = turns(&["--workers", "local,rig2,local"], &|chat| {
        cluster.head.object(&["cluster", "drain", "rig2"]);
        chat.says("rig3 has the layers of rig2");
    });
    assert_eq!([&moved[0]["text"], &moved[1]["text"]], [&alone[0]["text"], &alone[1]["text"]]);
    assert_eq!(moved[0].get("recoveries"), None, "{}", moved[0]);
    let recovery = &moved[1]["recoveries"][0];
    let seconds = ["noticed_seconds", "replaced_seconds", "load_seconds"].map(|name| recovery[name].as_f64().unwrap());
    assert!(seconds.iter().all(|seconds| (0.0..100.0).contains(seconds)), "{recovery}");
    assert!(recovery["by"].as_str().is_some_and(|by| by.contains("rig3 in the place of rig2")), "{}", moved[1]);
}
