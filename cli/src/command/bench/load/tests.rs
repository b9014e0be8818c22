//! Against servers that do just what a test says.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use serde_json::{Map, Value};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Barrier;
use tokio::time::sleep;

use super::arrivals::Asks;
use super::client::{Sample, Target};
use super::figures::{Goal, Level, LoadReport};
use super::{Come, Row};
use crate::args::{ApiArg, Lengths};
use crate::output::Report;

/// Between two pieces of a scripted answer.
const PAUSE: Duration = Duration::from_millis(20);

/// What a server does with a request; they are numbered as they come.
#[derive(Clone)]
enum Deed {
    /// Streams so many pieces and a count of tokens.
    Pieces(usize, u64),
    /// The same without counting, once as many as the barrier wants have come.
    Together(Arc<Barrier>),
    /// A status, and a body.
    Status(u16, &'static str),
    /// Lines of a stream, and its end.
    Lines(&'static str),
    /// Never a word.
    Silence,
}

struct Server {
    url: String,
    now: Arc<AtomicUsize>,
    most: Arc<AtomicUsize>,
    count: Arc<AtomicUsize>,
    bodies: Arc<std::sync::Mutex<Vec<Value>>>,
}

impl Server {
    async fn start(deed: impl Fn(usize) -> Deed + Send + Sync + 'static) -> Server {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let counter = || Arc::new(AtomicUsize::new(0));
        let url = format!("http://{}", listener.local_addr().unwrap());
        let server = Server { url, now: counter(), most: counter(), count: counter(), bodies: Arc::default() };
        let (now, most, count, bodies) =
            (server.now.clone(), server.most.clone(), server.count.clone(), server.bodies.clone());
        let deed = Arc::new(deed);
        tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                let (now, most, count, bodies, deed) =
                    (now.clone(), most.clone(), count.clone(), bodies.clone(), deed.clone());
                tokio::spawn(async move {
                    let mut stream = stream;
                    let body = read(&mut stream).await;
                    bodies.lock().unwrap().push(body);
                    let number = count.fetch_add(1, Ordering::SeqCst);
                    most.fetch_max(now.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
                    let done = serve(&mut stream, deed(number)).await;
                    now.fetch_sub(1, Ordering::SeqCst);
                    done
                });
            }
        });
        server
    }

    fn target(&self, timeout: Duration) -> Arc<Target> {
        let mut more = Map::new();
        more.insert("ignore_eos".to_owned(), true.into());
        let mut target = Target::new(&self.url, Some("secret"), ApiArg::Chat, more, timeout).unwrap();
        target.model = "toy".to_owned();
        Arc::new(target)
    }

    fn row(&self, count: usize) -> Row {
        Row { target: self.target(Duration::from_secs(60)), asks: asks(), count, duration: None }
    }
}

fn asks() -> Asks {
    let lengths = |least, most| Lengths { least, most };
    Asks { prompt: lengths(4, 32), answer: lengths(3, 3), seed: 7 }
}

/// The body of a request, whose head must carry the key.
async fn read(stream: &mut TcpStream) -> Value {
    let mut bytes = Vec::new();
    loop {
        let mut piece = [0; 4096];
        let read = stream.read(&mut piece).await.unwrap();
        bytes.extend_from_slice(&piece[..read]);
        let text = String::from_utf8_lossy(&bytes).to_lowercase();
        let Some(head) = text.find("\r\n\r\n") else { continue };
        assert!(text[..head].contains("authorization: bearer secret"), "{text}");
        let length = text.split("content-length: ").nth(1).and_then(|rest| rest.lines().next());
        let length: usize = length.and_then(|length| length.parse().ok()).unwrap_or(0);
        if bytes.len() >= head + 4 + length {
            return serde_json::from_slice(&bytes[head + 4..]).unwrap_or_default();
        }
    }
}

const STREAM: &str = "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n";
const ROLE: &str = "data: {\"choices\":[{\"index\":0,\"delta\":{\"role\":\"assistant\",\"content\":\"\"}}]}\r\n\r\n";
const END: &str = "data: {\"choices\":[{\"index\":0,\"delta\":{},\"finish_reason\":\"length\"}]}\n\ndata: [DONE]\n\n";

async fn pieces(stream: &mut TcpStream, count: usize, usage: Option<u64>) -> std::io::Result<()> {
    stream.write_all(format!("{STREAM}: a comment\n\n{ROLE}").as_bytes()).await?;
    for piece in 0..count {
        sleep(PAUSE).await;
        // In two parts: what arrives together need not be a line.
        let text = format!("data: {{\"choices\":[{{\"index\":0,\"delta\":{{\"content\":\"{piece}\"}}}}]}}\n\n");
        let (a, b) = text.split_at(9);
        stream.write_all(a.as_bytes()).await?;
        stream.flush().await?;
        stream.write_all(b.as_bytes()).await?;
    }
    if let Some(tokens) = usage {
        let usage = format!("{{\"prompt_tokens\":11,\"completion_tokens\":{tokens}}}");
        stream.write_all(format!("data: {{\"choices\":[],\"usage\":{usage}}}\n\n").as_bytes()).await?;
    }
    stream.write_all(END.as_bytes()).await
}

async fn serve(stream: &mut TcpStream, deed: Deed) -> std::io::Result<()> {
    match deed {
        Deed::Pieces(count, tokens) => pieces(stream, count, Some(tokens)).await,
        Deed::Together(barrier) => {
            barrier.wait().await;
            pieces(stream, 3, None).await
        }
        Deed::Status(status, body) => {
            let head = format!("HTTP/1.1 {status} X\r\ncontent-length: {}\r\nconnection: close\r\n\r\n", body.len());
            stream.write_all(format!("{head}{body}").as_bytes()).await
        }
        Deed::Lines(lines) => stream.write_all(format!("{STREAM}{ROLE}{lines}").as_bytes()).await,
        Deed::Silence => {
            sleep(Duration::from_secs(3600)).await;
            Ok(())
        }
    }
}

fn run<T>(test: impl Future<Output = T>) -> T {
    tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(test)
}

#[test]
fn as_many_as_wanted_are_under_way_and_all_are_counted() {
    run(async {
        let server = Server::start(|_| Deed::Pieces(4, 6)).await;
        let (samples, seconds) = server.row(10).at_once(3).await;
        assert_eq!((samples.len(), server.count.load(Ordering::SeqCst)), (10, 10));
        assert_eq!(server.most.load(Ordering::SeqCst), 3, "never more, and as many at some time");
        let level = Level::of(Come::AtOnce(3), &samples, seconds, Goal::default());
        assert_eq!((level.ok, level.completion_tokens, level.prompt_tokens), (10, 60, Some(110)));
        assert!(level.counted_by_server && level.errors.is_empty());
        for sample in &samples {
            assert_eq!((sample.pieces, sample.gaps.len()), (4, 3));
            let first = sample.first.unwrap();
            assert!(first >= PAUSE.as_secs_f64(), "the role is no token: {first}");
            assert!(first <= sample.last && sample.last <= sample.end);
            let gaps: f64 = sample.gaps.iter().sum();
            assert!((gaps - (sample.last - first)).abs() < 1e-6);
            assert!((sample.per_token().unwrap() - gaps / 5.0).abs() < 1e-6, "six tokens in four pieces");
        }
        for body in server.bodies.lock().unwrap().iter() {
            assert_eq!(body["max_tokens"], 3);
            assert_eq!(body["model"], "toy");
            assert_eq!(body["ignore_eos"], true, "what --body adds");
            assert_eq!(body["stream_options"]["include_usage"], true);
            assert!(body["messages"][0]["content"].as_str().unwrap().split(' ').count() >= 4);
        }
    });
}

#[test]
fn slow_answers_do_not_keep_requests_from_coming() {
    run(async {
        // Nobody is answered before all eight have come.
        let barrier = Arc::new(Barrier::new(8));
        let server = Server::start(move |_| Deed::Together(barrier.clone())).await;
        let (samples, seconds) = server.row(8).at_rate(400.0).await;
        assert!(samples.iter().all(|sample| sample.outcome.is_ok()));
        let level = Level::of(Come::Rate(400.0), &samples, seconds, Goal::default());
        assert_eq!((level.ok, level.completion_tokens, level.counted_by_server), (8, 24, false));
        assert_eq!(server.most.load(Ordering::SeqCst), 8);
    });
}

#[test]
fn failures_are_told_by_kind_and_spoil_nothing() {
    run(async {
        let deeds = [
            Deed::Status(429, "{\"error\":{\"message\":\"the queue is full\"}}"),
            Deed::Status(500, "oh\u{1b}[2J"),
            Deed::Lines("data: {\"error\":{\"message\":\"stage 1 is lost\"}}\n\n"),
            Deed::Lines("data: {\"choices\":[{\"delta\":{\"content\":\"a\"}}]}\n\n"),
            Deed::Lines("data: {not json\n\n"),
            Deed::Silence,
            Deed::Pieces(2, 2),
        ];
        let server = Server::start(move |number| deeds[number % 7].clone()).await;
        let target = server.target(Duration::from_millis(500));
        let (samples, seconds) = Row { target, ..server.row(7) }.at_once(1).await;
        let level = Level::of(Come::AtOnce(1), &samples, seconds, Goal::default());
        assert_eq!((level.requests, level.ok, level.completion_tokens), (7, 1, 2));
        let kinds: Vec<(&str, usize)> =
            level.errors.iter().map(|(kind, failed)| (kind.as_str(), failed.count)).collect();
        let expected = [
            "HTTP 429 Too Many Requests",
            "HTTP 500 Internal Server Error",
            "bad stream",
            "cut off",
            "error in the stream",
            "timeout",
        ];
        assert_eq!(kinds, expected.map(|kind| (kind, 1)));
        assert!(level.errors["HTTP 429 Too Many Requests"].example.ends_with("the queue is full"));
        let escaped = &level.errors["HTTP 500 Internal Server Error"].example;
        assert!(!escaped.contains('\u{1b}'), "a server's words do nothing to a terminal: {escaped:?}");
    });
    run(async {
        let nobody = TcpListener::bind("127.0.0.1:0").await.unwrap().local_addr().unwrap();
        let target = Target::new(&format!("http://{nobody}/v1/"), None, ApiArg::Completions, Map::new(), PAUSE * 100);
        let target = target.unwrap();
        assert_eq!(target.endpoint(), format!("http://{nobody}/v1/completions"));
        let sample = target.ask(&asks().at(0), tokio::time::Instant::now()).await;
        assert_eq!(sample.outcome.unwrap_err().kind, "no connection");
    });
}

/// A sample of an answer of eleven tokens.
fn sample(first: f64, last: f64) -> Sample {
    Sample {
        first: Some(first),
        last,
        end: last,
        gaps: vec![last - first],
        usage: Some((5, 11)),
        pieces: 2,
        outcome: Ok(()),
    }
}

#[test]
fn figures_are_nearest_ranks_and_good_is_what_meets_every_goal() {
    let samples: Vec<Sample> = (1..=10).map(|i| sample(0.1 * f64::from(i), 0.1 * f64::from(i) + 1.0)).collect();
    let goal = Goal { ttft: Some(550.0), tpot: Some(101.0), e2e: Some(1450.0) };
    let level = Level::of(Come::AtOnce(2), &samples, 5.0, goal);
    let close = |found: f64, expected: f64| assert!((found - expected).abs() < 1e-9, "{found} for {expected}");
    let ttft = level.ttft_seconds.unwrap();
    close(ttft.p50, 0.5);
    close(ttft.p90, 0.9);
    close(ttft.p99, 1.0);
    close(level.tpot_seconds.unwrap().max, 0.1);
    close(level.output_tokens_per_s, 22.0);
    close(level.input_tokens_per_s.unwrap(), 10.0);
    close(level.good_share.unwrap(), 0.4);
    close(level.goodput_per_s.unwrap(), 0.8);
}

#[test]
fn requests_are_a_function_of_the_seed_and_none_begins_like_another() {
    let asks = asks();
    let firsts: Vec<String> = (0..200).map(|number| asks.at(number).prompt).collect();
    assert_eq!(firsts, (0..200).map(|number| asks.at(number).prompt).collect::<Vec<_>>());
    assert!(firsts.iter().all(|prompt| (4..=32).contains(&prompt.split(' ').count())));
    let mut sorted = firsts.clone();
    sorted.sort();
    sorted.dedup();
    assert_eq!(sorted.len(), firsts.len());
    let times: Vec<Duration> = asks.arrivals(50.0).take(5000).collect();
    assert!(times.is_sorted());
    let mean = times[4999].as_secs_f64() / 5000.0;
    assert!((0.018..0.022).contains(&mean), "{mean} s between arrivals at 50 a second");
}

#[test]
fn the_report_is_a_table_and_a_picture() {
    let samples = [sample(0.1, 1.1), sample(0.2, 1.4)];
    let goal = Goal { ttft: Some(150.0), ..Goal::default() };
    let mut levels: Vec<Level> = [1, 8, 64].map(|count| Level::of(Come::AtOnce(count), &samples, 2.0, goal)).into();
    let failed = Level::of(Come::AtOnce(128), &[Sample::not_sent(4096)], 1.0, goal);
    levels.push(failed);
    let report = LoadReport {
        url: "http://host/v1/chat/completions".to_owned(),
        model: "<toy> & \"co\"".to_owned(),
        prompt_tokens: "4..32".to_owned(),
        gen_tokens: "3".to_owned(),
        seed: 0,
        slo: goal,
        levels,
    };
    let text = report.text();
    assert!(text.contains("100.0/200.0/200.0") && text.contains("0.50 (50 %)"), "{text}");
    assert!(text.contains("128: 1 × not sent: 4096 requests were under way already"), "{text}");
    let svg = super::plot::draw(&report);
    let parsed = roxmltree::Document::parse(&svg).unwrap();
    let points: Vec<usize> = parsed
        .descendants()
        .filter(|node| node.has_tag_name("polyline"))
        .map(|node| node.attribute("points").unwrap().split_whitespace().count())
        .collect();
    // A level that nobody answered has a rate of 0 and no latencies.
    assert_eq!(points, [4, 3, 3, 3, 3, 3, 3]);
    let numbers =
        parsed.descendants().flat_map(|node| node.attributes()).filter(|a| matches!(a.name(), "x" | "y" | "cx" | "cy"));
    numbers.for_each(|a| assert!(a.value().parse::<f64>().is_ok_and(f64::is_finite), "{a:?}"));
}
