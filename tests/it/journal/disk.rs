//! A disk that takes no more, and a journal that is full.

use std::io::Read;
use std::process::Command;

use serde_json::{Value, json};

use super::{Desk, Stream, chat};
use crate::cli::program;
use crate::serve::client::Server;
use crate::serve::eventually;

const CHAT: &str = "/v1/chat/completions";

fn code(server: &Server, body: Value) -> (u16, Value) {
    let response = server.post(CHAT, &chat(body));
    (response.status, response.json()["error"]["code"].clone())
}

/// What runs goes on, nothing new is taken, everybody can see it; and all is well again once the disk is.
#[test]
fn a_disk_that_takes_no_more_is_told_and_what_runs_goes_on() {
    let desk = Desk::new();
    let arguments = desk.arguments(&["--port", "0", "--json", "--quiet"]);
    let arguments: Vec<&str> = ["serve"].into_iter().chain(arguments.iter().map(String::as_str)).collect();
    let plain = program(&arguments);
    // Files of the process may have so many KiB; it hears of it as of any other failure. So does its log, which is on the same
    // disk, as it were.
    let log = desk.dir.path().join("log");
    std::fs::write(&log, vec![b'\n'; 20_000]).unwrap();
    let limited = "trap '' XFSZ; ulimit -S -f 12; exec \"$0\" \"$@\" 2>>\"$LOG\"";
    let mut shell = Command::new("bash");
    shell.args(["-c", limited]).arg(plain.get_program()).args(plain.get_args());
    shell.env("LOG", &log).envs(plain.get_envs().filter_map(|(name, value)| Some((name, value?))));
    let server = Server::spawn(&mut shell);
    let body = chat(json!({"max_tokens": 150, "stream": true})).to_string();
    let mut running = server.begin("POST", CHAT, &[("x-request-id", "runs")], &body);
    let mut begun = vec![0; 900];
    running.read_exact(&mut begun).unwrap();
    let large = json!({"max_tokens": 1, "user": "x".repeat(20_000)});
    assert_eq!(code(&server, large.clone()), (503, "journal_failing".into()), "it could not be written");
    assert_eq!(code(&server, json!({"max_tokens": 1})), (503, "journal_failing".into()));
    let ready = server.get("/ready");
    assert_eq!((ready.status, &ready.json()["error"]["code"]), (503, &"journal_failing".into()));
    assert!(server.get("/metrics").body.contains("pp_run_journal_up 0.0\n"));
    assert!(Stream::read(running, begun).is_done, "what runs goes on");
    let lifted = Command::new("prlimit").args(["--pid", &server.id().to_string(), "--fsize=unlimited:"]).status();
    assert!(lifted.unwrap().success());
    eventually("it is written again", || server.get("/ready").status == 200);
    assert_eq!(server.post(CHAT, &chat(large)).status, 200);
    drop(server);
    let server = desk.server(&["--resume"]);
    assert_eq!(server.get("/v1/requests/runs?stream=false").ok()["usage"]["completion_tokens"], 150);
}

/// What would not fit with all that it may come to is refused; answers that are kept make room first.
#[test]
fn a_journal_that_is_full_takes_no_more() {
    let desk = Desk::new();
    let server = desk.server(&["--journal-bytes", "1048576"]);
    let text = "x".repeat(300_000);
    let kept = json!({"max_tokens": 1, "user": text});
    for name in ["a", "b", "c"] {
        server.post_named(name, CHAT, &chat(kept.clone())).ok();
    }
    assert_eq!(server.get("/v1/requests/a").status, 404, "it made room");
    server.get("/v1/requests/c").ok();
    let body = chat(json!({"max_tokens": 150, "stream": true, "user": text})).to_string();
    let mut running = server.begin("POST", CHAT, &[], &body);
    let mut begun = vec![0; 900];
    running.read_exact(&mut begun).unwrap();
    assert_eq!(code(&server, kept.clone()), (429, "journal_full".into()));
    assert_eq!(server.post(CHAT, &chat(json!({"max_tokens": 1}))).status, 200, "what fits is taken");
    drop(running);
    eventually("there is room", || server.post(CHAT, &chat(kept.clone())).status == 200);
    assert!(std::fs::metadata(desk.path()).unwrap().len() <= 1 << 20);
}
