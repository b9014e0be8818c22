//! `bench --url`: a server of our own, one that is not there, and what makes no sense.

use std::net::TcpListener;
use std::process::Command;

use serde_json::Value;

use super::bad_input::{USAGE, refused};
use super::{model, object};
use crate::cluster::processes::Running;

const FAILURE: i32 = 1;

#[test]
fn what_makes_no_sense_of_a_server_is_refused() {
    let url = ["bench", "--url", "http://127.0.0.1:9"];
    let refused = |more: &[&str], wanted: &[&str]| refused(&[&url, more].concat(), USAGE, wanted);
    refused(&["--concurrency", "0"], &["--concurrency 0", "1 to 4096"]);
    refused(&["--rate", "-1"], &["--rate"]);
    refused(&["--rate", "0"], &["--rate 0", "more than 0"]);
    refused(&["--rate", "1", "--concurrency", "1"], &["--rate", "--concurrency"]);
    refused(&["--count", "0"], &["--count 0"]);
    refused(&["--timeout", "0"], &["--timeout 0"]);
    refused(&["--slo-ttft", "0"], &["--slo-ttft 0"]);
    refused(&["--prompt-tokens", "9..3"], &["--prompt-tokens", "16..512"]);
    refused(&["--body", "[1]"], &["--body", "JSON object"]);
    refused(&["--api-key", "/nonexistent/key"], &["--api-key", "/nonexistent/key"]);
    refused(&["--stages", "2"], &["--url", "--stages"]);
}

#[test]
fn an_address_that_is_none_and_a_server_that_is_not_there_are_told() {
    refused(&["bench", "--url", "localhost:8080"], USAGE, &["localhost:8080", "http://127.0.0.1:8080"]);
    refused(&["bench", "--rate", "1"], USAGE, &["--url"]);
    // Nobody listens where somebody just did.
    let free = TcpListener::bind("127.0.0.1:0").expect("a port").local_addr().expect("an address");
    let url = format!("http://{free}");
    refused(&["bench", "--url", &url], FAILURE, &[&url, "no connection", "refused"]);
    refused(&["bench", "--url", &url, "-m", "toy"], FAILURE, &[&url, "no connection", "refused"]);
}

/// A server of a tiny model, and its address.
fn server(more: &[&str]) -> (Running, String) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_pp-run"));
    command.args(["serve", "--port", "0", "--json", "--device", "reference", "--stages", "2"]).args(more);
    command.args(["-m", &model("tiny/llama-untied")]);
    let mut running = Running::start(&mut command);
    let ready: Value = serde_json::from_str(&running.prints("{")).expect("JSON");
    let url = ready["url"].as_str().expect("an address").to_owned();
    (running, url)
}

#[test]
fn our_own_server_is_measured_and_every_token_counted() {
    let dir = tempfile::tempdir().expect("a folder");
    let (key, svg) = (dir.path().join("key"), dir.path().join("load.svg"));
    std::fs::write(&key, "a-key-of-sixteen-letters-and-more\n").expect("room");
    let (key, svg) = (key.to_str().expect("UTF-8"), svg.to_str().expect("UTF-8"));
    let (_server, url) = server(&["--api-key", key]);
    let common = ["bench", "--url", &url, "--prompt-tokens", "4..16", "--gen-tokens", "6"];
    let common = [&common[..], &["--body", "{\"logit_bias\": {}}"]].concat();
    refused(&common, FAILURE, &[&url, "401", "API key"]);
    let with_key = [&common[..], &["--api-key", key]].concat();
    let found = object(&[&with_key[..], &["--concurrency", "1,4", "--count", "12", "--svg", svg]].concat());
    assert_eq!(found["model"], "llama-untied");
    for (level, at_once) in found["levels"].as_array().expect("levels").iter().zip([1, 4]) {
        assert_eq!([&level["concurrency"], &level["requests"], &level["ok"]], [at_once, 12, 12]);
        assert_eq!(level["counted_by_server"], true);
        let tokens = level["completion_tokens"].as_u64().expect("counted");
        // Unless the model ends an answer, each is as long as it may be.
        assert!((12..=72).contains(&tokens), "{level}");
        let seconds = level["seconds"].as_f64().expect("a time");
        let rate = level["output_tokens_per_s"].as_f64().expect("a rate");
        assert!((rate * seconds - tokens as f64).abs() < 1e-6 * tokens as f64, "{level}");
        for spread in ["ttft_seconds", "e2e_seconds"] {
            let at = |rank: &str| level[spread][rank].as_f64().expect("a time");
            assert!(0.0 < at("p50") && at("p50") <= at("p99") && at("p99") <= at("max"), "{level}");
        }
    }
    let svg = std::fs::read_to_string(svg).expect("the picture");
    assert!(roxmltree::Document::parse(&svg).is_ok_and(|svg| svg.root_element().has_tag_name("svg")));
    let completions = ["--api", "completions", "--rate", "50", "--count", "10", "--slo-e2e", "60000"];
    let found = object(&[&with_key[..], &completions].concat());
    let level = &found["levels"][0];
    assert_eq!([&level["ok"], &level["good_share"]], [&Value::from(10), &Value::from(1.0)], "{level}");
    refused(&[&with_key[..], &["-m", "another"]].concat(), FAILURE, &["404", "another"]);
}
