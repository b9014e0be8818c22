//! A server whose stage is on a worker that stops, dies, and comes back.

use std::io::Read;

use serde_json::{Value, json};

use super::client::{Response, Server};
use super::{chat, eventually};
use crate::cli::model;
use crate::cluster::processes::Cluster;

/// While the worker is stopped a probe finds that nothing comes through, and says which stage has it; whoever is gone
/// meanwhile is forgotten. When it is killed, everybody hears which stage is down, until it is there again.
#[test]
fn a_stage_that_is_stopped_or_dead_is_named() {
    let mut cluster = Cluster::of(&["rig2"], "tiny/llama-33");
    let m = model("tiny/llama-33");
    let arguments =
        ["serve", "--port", "0", "--json", "--quiet", "-m", &m, "--workers", "rig2", "--device", "reference"];
    let arguments = [&arguments[..], &["--no-recover", "--recover-wait", "120"]].concat();
    let server = Server::spawn(&mut cluster.head.program(&arguments));
    let health = server.get("/health").ok();
    assert_eq!((&health["status"], &health["stages"]), (&"ok".into(), &2.into()));
    let expected = server.post("/v1/chat/completions", &chat(json!({}))).ok();

    cluster.workers[0].1.0.signal("STOP");
    let silent = server.get("/health");
    let error = &silent.json()["error"];
    assert_eq!((silent.status, &error["stage"]), (503, &1.into()), "{error}");
    assert!(error["message"].as_str().unwrap().contains("stage 1 on rig2"), "{error}");
    cluster.workers[0].1.0.signal("CONT");
    // By then it may have been taken for lost, and another pipeline opened.
    eventually("it answers again", || server.get("/health").status == 200);
    let restarts = server.get("/health").ok()["restarts"].as_u64().unwrap();

    let (machine, worker) = cluster.workers.remove(0);
    // Gone for good with all that it says, and without a farewell.
    let address = cluster.head.address_of("rig2");
    worker.0.signal("KILL");
    drop(worker);
    eventually("it is down", || server.get("/ready").status == 503);
    for path in ["/ready", "/health"] {
        let down = server.get(path);
        let error = &down.json()["error"];
        assert_eq!(
            (down.status, &error["code"], &error["stage"]),
            (503, &"pipeline_down".into(), &1.into()),
            "{error}"
        );
    }
    let refused = server.post("/v1/chat/completions", &chat(json!({})));
    let error = &refused.json()["error"];
    assert_eq!((refused.status, &error["type"], &error["stage"]), (503, &"server_error".into(), &1.into()), "{error}");
    assert!(error["message"].as_str().unwrap().contains("rig2"), "{error}");
    assert!(refused.header("retry-after").is_some());

    let mut back = machine.worker("rig2", Some(&address), &[], &[]);
    back.ready();
    eventually("another pipeline runs", || server.get("/ready").status == 200);
    let found = server.post("/v1/chat/completions", &chat(json!({}))).ok();
    assert_eq!(found["choices"][0]["message"], expected["choices"][0]["message"]);
    assert_eq!(server.get("/health").ok()["restarts"], restarts + 1);
}

/// A stream whose stage dies in its middle says so, pauses, and goes on with the text that it would have had; so does
/// whoever asks meanwhile.
#[test]
fn a_stream_outlives_its_stage() {
    let mut cluster = Cluster::of(&["rig2"], "tiny/llama-33");
    let m = model("tiny/llama-33");
    let arguments =
        ["serve", "--port", "0", "--json", "--quiet", "-m", &m, "--workers", "rig2", "--device", "reference"];
    let server = Server::spawn(&mut cluster.head.program(&[&arguments[..], &["--recover-wait", "120"]].concat()));
    let wanted = chat(json!({"max_tokens": 120, "temperature": 0.8, "seed": 3}));
    let expected = server.post("/v1/chat/completions", &wanted).ok();
    let expected = expected["choices"][0]["message"]["content"].as_str().unwrap();

    let address = cluster.head.address_of("rig2");
    let (machine, worker) = cluster.workers.remove(0);
    let mut streamed = wanted.clone();
    streamed["stream"] = true.into();
    let headers = [("content-type", "application/json")];
    let mut stream = server.begin("POST", "/v1/chat/completions", &headers, &streamed.to_string());
    let mut begun = vec![0; 2000];
    stream.read_exact(&mut begun).unwrap();
    worker.0.signal("KILL");
    drop(worker);
    eventually("it is down", || server.get("/ready").status == 503);
    let meanwhile = server.begin("POST", "/v1/chat/completions", &headers, &wanted.to_string());
    let mut back = machine.worker("rig2", Some(&address), &[], &[]);
    back.ready();

    stream.read_to_end(&mut begun).unwrap();
    let text = String::from_utf8(begun).unwrap();
    let mut comments = text.lines().filter(|line| line.starts_with(':'));
    assert!(comments.any(|line| line.contains("stage 1 on rig2")), "{text}");
    assert!(comments.any(|line| line.contains("rig2 is back; rebuilding")), "{text}");
    let data = text.lines().filter_map(|line| line.strip_prefix("data: ")).filter(|data| *data != "[DONE]");
    let chunks: Vec<Value> = data.map(|data| serde_json::from_str(data).unwrap()).collect();
    let found: String = chunks.iter().filter_map(|chunk| chunk["choices"][0]["delta"]["content"].as_str()).collect();
    assert_eq!(found, expected);
    let other = Response::read(meanwhile).ok();
    assert_eq!(other["choices"][0]["message"]["content"], expected);
}

/// A server that is told to end while its pipeline is down ends, and the next one finishes what its journal holds.
#[test]
fn what_waits_for_a_pipeline_outlives_the_server() {
    let mut cluster = Cluster::of(&["rig2"], "tiny/llama-33");
    let (m, folder) = (model("tiny/llama-33"), tempfile::tempdir().unwrap());
    let journal = folder.path().join("journal").to_str().unwrap().to_owned();
    let arguments =
        ["serve", "--port", "0", "--json", "--quiet", "-m", &m, "--workers", "rig2", "--device", "reference"];
    let arguments =
        [&arguments[..], &["--recover-wait", "120", "--drain", "1", "--journal", &journal, "--resume"]].concat();
    let mut server = Server::spawn(&mut cluster.head.program(&arguments));
    let wanted = chat(json!({"max_tokens": 120, "temperature": 0.8, "seed": 3}));
    let expected = server.post("/v1/chat/completions", &wanted).ok();

    let address = cluster.head.address_of("rig2");
    let (machine, worker) = cluster.workers.remove(0);
    let mut streamed = wanted.clone();
    streamed["stream"] = true.into();
    let headers = [("content-type", "application/json"), ("x-request-id", "mine")];
    let mut stream = server.begin("POST", "/v1/chat/completions", &headers, &streamed.to_string());
    stream.read_exact(&mut [0; 2000]).unwrap();
    worker.0.signal("KILL");
    drop(worker);
    eventually("it is down", || server.get("/ready").status == 503);
    server.terminate();
    assert!(server.wait().success());
    let mut back = machine.worker("rig2", Some(&address), &[], &[]);
    back.ready();
    let server = Server::spawn(&mut cluster.head.program(&arguments));
    let found = server.get("/v1/requests/mine?stream=false").ok();
    assert_eq!(found["choices"][0]["message"], expected["choices"][0]["message"]);
}
