//! `bench --url`: what a server is asked for that is not there, or never could be.

use std::net::TcpListener;

use super::bad_input::{USAGE, refused};

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
