//! Answers a file of requests, as many at a time as fit the pipe.
//!
//! Answers are appended as they are complete, a line each, and pushed to the disk's cache at once. A later run with the
//! same files goes on where this one ended: it reads which lines have an answer, and cuts off half a line at the end.
//! With a journal ([`middle`]) it also goes on with the answers that were in their middle.

mod middle;

use std::collections::{HashMap, VecDeque};
use std::fs::{File, OpenOptions};
use std::io::{Seek, SeekFrom, Write};
use std::path::Path;
use std::process::ExitCode;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use pp_engine::head::{Answer, Event, FinishReason, Head, HeadError, Request};
use pp_engine::schedule::{Refused, RequestId};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::args::BatchArgs;
use crate::errors::{Exit, usage};
use crate::output::live::Live;
use crate::output::progress::Steps;
use crate::output::{Out, Report};
use crate::plan::{self, Wanted};
use crate::prompts::{Form, Prompts};
use crate::recovery::{Recovered, Recovery, Straggler};
use crate::report::{StageRow, TokenRow, stage_table};
use crate::requests::tools::{self, CallIds, ToolCall, ToolUse};
use crate::requests::{self, Defaults, RequestLine};
use crate::settings::{self, SEQUENCES};
use crate::{cancel, models, report};
use middle::Middle;

/// What every line of answers begins with.
const LINE_BEGIN: &[u8] = b"{\"line\":";
/// How long the head waits for the pipe before it looks whether it should stop.
const PATIENCE: Duration = Duration::from_millis(100);

/// Answers every line that has no answer yet.
pub fn run(args: &BatchArgs) -> Result<ExitCode> {
    let out = Out::new(args.output.json, args.quiet);
    let done = Done::read(&args.out)?;
    let checkpoint = super::open(&args.model)?;
    let mut middle = Middle::open(args, || models::digest_of(&checkpoint, &out), &out)?;
    let template = super::run::chat_template(args.chat_template.as_deref())?;
    let also = format!("{template:?} {:?}", args.tool_format);
    let prompts = Prompts::new(&checkpoint, template)?.with_tool_format(args.tool_format.map(settings::tool_format));
    let defaults = Defaults {
        sampling: settings::sampling(&args.sampling, &checkpoint.generation, 0, 0)?,
        max_tokens: args.sampling.max_tokens,
        stop: args.sampling.stop.clone(),
    };
    let also = format!("{also} {defaults:?}");
    let vocab = checkpoint.config.vocab;
    let mut lines: Vec<Line> = Vec::new();
    for line in requests::open(&args.file)? {
        let (number, text) = line?;
        let wanted = text.as_ref().map_or(String::new(), |text| wanted(text, &also));
        let parsed = text.and_then(|text| RequestLine::parse(&text));
        let id = parsed.as_ref().ok().and_then(|line| line.id.clone());
        if !done.has(number, id.as_ref()) {
            let job = parsed.and_then(|line| job(&line, &prompts, &defaults, vocab));
            lines.push(Line { number, id, job, wanted });
        }
    }
    let wanted: HashMap<usize, &str> = lines.iter().map(|line| (line.number, line.wanted.as_str())).collect();
    middle.keep(|line, as_then| wanted.get(&line) == Some(&as_then));
    let total = lines.len() + done.lines.len();
    let jobs = || lines.iter().filter_map(|line| line.job.as_ref().ok());
    let answers = jobs().map(|job| job.request.choices as usize).sum::<usize>();
    let wanted = Wanted::several(jobs().map(Job::positions).max(), answers.clamp(1, SEQUENCES));
    if !done.lines.is_empty() {
        out.note(&format!("{} of {total} lines have an answer in {} already", done.lines.len(), args.out.display()));
    }
    if middle.begun() > 0 {
        out.note(&format!("what the journal holds goes on from its middle: {}", middle.begun()));
    }
    let plan = plan::make(checkpoint.clone(), &args.pipeline, wanted, &out)?;
    let precision = super::precision(&plan);
    let file = done.open(&args.out)?;
    let options = super::head_options(&args.pipeline);
    let (mut recovery, mut head, load_seconds) =
        Recovery::load(plan, &args.pipeline, options, prompts.tokenizer().clone(), &out)?;
    middle.with(&head, precision, &out);
    let started = Instant::now();
    let live = Live::new(args.live, &out);
    let mut batch = Batch {
        file,
        path: &args.out,
        prompts: &prompts,
        bar: Steps::new(&out.quiet_if(live.is_on()), "answered", "lines"),
        live,
        total,
        answered: total - lines.len(),
        report: BatchReport { lines: total, ..BatchReport::default() },
        running: HashMap::new(),
        middle,
        out: &out,
    };
    let cancelled = batch.answer(lines, &mut head, &mut recovery)?;
    batch.bar.finish();
    drop(batch.live);
    let seconds = started.elapsed().as_secs_f64();
    if let Some(path) = &args.trace {
        super::write_trace(&head.trace(), path)?;
    }
    out.result(&BatchReport {
        seconds,
        load_seconds,
        out: args.out.display().to_string(),
        left: total - batch.answered,
        stages: report::stages(head.pipeline()),
        recoveries: recovery.happened().to_vec(),
        stragglers: recovery.stragglers().to_vec(),
        tokens_per_s: batch.report.tokens as f64 / seconds.max(1e-9),
        ..batch.report
    })?;
    Ok(if cancelled { ExitCode::from(Exit::Cancelled as u8) } else { ExitCode::SUCCESS })
}

/// A line to answer.
struct Line {
    number: usize,
    id: Option<Value>,
    job: Result<Job, String>,
    /// The digest of what it and the options say.
    wanted: String,
}

/// What decides about an answer, beside the model: the line, and options for all lines.
fn wanted(line: &str, also: &str) -> String {
    blake3::Hasher::new().update(line.as_bytes()).update(&[0]).update(also.as_bytes()).finalize().to_hex().to_string()
}

struct Job {
    request: Request,
    /// Compiled when its turn comes: a file may have any number of grammars.
    form: Form,
    tools: Option<ToolUse>,
    logprobs: bool,
}

impl Job {
    /// Positions that it may take.
    fn positions(&self) -> usize {
        self.request.prompt.len().saturating_add(self.request.max_tokens)
    }
}

fn job(line: &RequestLine, prompts: &Prompts, defaults: &Defaults, vocab: usize) -> Result<Job, String> {
    // What is out of range is told before what is missing.
    let request = line.request(Vec::new(), defaults, vocab)?;
    let tools = line.tools()?;
    let form = line.form(prompts, tools.as_ref())?;
    let shown_specials = form.shown_specials.clone();
    let request = Request { prompt: line.ids(prompts, tools.as_ref())?, shown_specials, ..request };
    Ok(Job { request, form, tools, logprobs: line.candidates().is_some() })
}

/// What a file of answers holds.
#[derive(Default)]
struct Done {
    lines: HashMap<usize, Option<Value>>,
    /// Bytes of whole lines.
    bytes: u64,
}

impl Done {
    fn read(path: &Path) -> Result<Done> {
        #[derive(Deserialize)]
        struct Key {
            line: usize,
            #[serde(default)]
            id: Option<Value>,
        }
        let text = match std::fs::read(path) {
            Ok(text) => text,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Done::default()),
            Err(error) => return Err(usage(format!("cannot read {}: {error}", path.display()))),
        };
        let mut done = Done::default();
        for line in text.split_inclusive(|byte| *byte == b'\n') {
            if line.last() != Some(&b'\n') && is_begun(line) {
                break;
            }
            let key: Key = serde_json::from_slice(line).map_err(|error| {
                usage(format!(
                    "{} is not a file of answers ({error} in its line {}): give another -o, or move it away",
                    path.display(),
                    done.lines.len() + 1
                ))
            })?;
            done.lines.insert(key.line, key.id.filter(|id| !id.is_null()));
            done.bytes += line.len() as u64;
        }
        Ok(done)
    }

    fn has(&self, number: usize, id: Option<&Value>) -> bool {
        self.lines.get(&number).is_some_and(|known| known.as_ref() == id.filter(|id| !id.is_null()))
    }

    /// The file, ready to be appended to.
    fn open(&self, path: &Path) -> Result<File> {
        let open = || -> std::io::Result<File> {
            let mut file = OpenOptions::new().create(true).truncate(false).write(true).open(path)?;
            file.set_len(self.bytes)?;
            file.seek(SeekFrom::End(0))?;
            Ok(file)
        };
        open().map_err(|error| usage(format!("cannot write {}: {error}", path.display())))
    }
}

/// Whether bytes may be the beginning of an answer.
fn is_begun(bytes: &[u8]) -> bool {
    let begin = &LINE_BEGIN[..LINE_BEGIN.len().min(bytes.len())];
    bytes.starts_with(begin)
}

struct Batch<'a> {
    file: File,
    path: &'a Path,
    prompts: &'a Prompts,
    bar: Steps,
    live: Live,
    total: usize,
    answered: usize,
    report: BatchReport,
    running: HashMap<RequestId, Pending>,
    middle: Middle,
    out: &'a Out,
}

struct Pending {
    line: usize,
    id: Option<Value>,
    job: Job,
    choices: Vec<Option<Answer>>,
}

impl Batch<'_> {
    /// Answers lines until there are no more, or the user wants it to end: true then. When a stage is lost, what it was at
    /// goes on in another pipeline.
    fn answer(&mut self, lines: Vec<Line>, head: &mut Head, recovery: &mut Recovery) -> Result<bool> {
        let mut lines: VecDeque<Line> = lines.into();
        self.bar.update(self.answered, self.total);
        while !lines.is_empty() || !self.running.is_empty() {
            if cancel::flag().load(Ordering::Relaxed) {
                return Ok(true);
            }
            while let Some(line) = lines.pop_front() {
                if let Some(line) = self.submit(line, head)? {
                    lines.push_front(line);
                    break;
                }
            }
            self.live.tick(head);
            let mut ended = Vec::new();
            let middle = &mut self.middle;
            let mut hear = |event| match event {
                Event::Token { choice, token } => middle.token(choice, token),
                Event::Done { choice, answer } => ended.push((choice, answer)),
                _ => {}
            };
            let turn = head.turn(PATIENCE, cancel::flag(), &mut hear);
            let turn = match turn {
                Err(error) if error.is_cancelled() => return Ok(true),
                Err(error) => recovery.recover(head, error, &mut hear),
                Ok(_) => {
                    recovery.tick(head);
                    Ok(())
                }
            };
            for (choice, answer) in ended {
                if answer.finish_reason == FinishReason::Failed {
                    if turn.is_ok()
                        && let Some(Pending { line, id, .. }) = self.running.remove(&choice.request)
                    {
                        self.write_error(line, id, "the pipeline that is left has no room for it")?;
                    }
                    continue;
                }
                let Some(pending) = self.running.get_mut(&choice.request) else { continue };
                pending.choices[choice.index as usize] = Some(answer);
                if pending.choices.iter().all(Option::is_some) {
                    let pending = self.running.remove(&choice.request).expect("it was there");
                    self.write_answer(pending)?;
                    self.middle.ended(choice.request, self.out);
                }
            }
            if turn.is_err() && cancel::flag().load(Ordering::Relaxed) {
                return Ok(true);
            }
            turn?;
        }
        Ok(false)
    }

    /// Gives a line to the head; gives it back where the head is busy.
    fn submit(&mut self, line: Line, head: &mut Head) -> Result<Option<Line>> {
        let job = match &line.job {
            Ok(job) => job,
            Err(message) => return self.write_error(line.number, line.id.clone(), message).map(|()| None),
        };
        // A few wait beside those that run; the rest stays here.
        let status = head.status();
        if status.waiting >= head.scheduler().limits().sequences || self.middle.must_wait(&line) {
            return Ok(Some(line));
        }
        let constraint = match self.prompts.constraint(&job.form, job.tools.as_ref()) {
            Ok(constraint) => constraint,
            Err(invalid) => return self.write_error(line.number, line.id.clone(), &invalid.to_string()).map(|()| None),
        };
        let mut request = Request { constraint, ..job.request.clone() };
        if let Some((prompt, begun)) = self.middle.of(line.number) {
            (request.prompt, request.begun) = (prompt, begun);
        }
        match head.submit(request) {
            Ok(request) => {
                self.middle.runs(request, &line, self.out);
                let Line { number, id, job, .. } = line;
                let job = job.expect("it was looked at");
                let choices = vec![None; job.request.choices.max(1) as usize];
                self.running.insert(request, Pending { line: number, id, job, choices });
                Ok(None)
            }
            Err(HeadError::Refused(Refused::Busy { .. })) => Ok(Some(line)),
            Err(error @ (HeadError::Refused(_) | HeadError::NoSuchToken { .. })) => {
                self.write_error(line.number, line.id.clone(), &error.to_string()).map(|()| None)
            }
            Err(error) => Err(error.into()),
        }
    }

    fn write_answer(&mut self, pending: Pending) -> Result<()> {
        let answers: Vec<Answer> = pending.choices.into_iter().flatten().collect();
        let rows: Vec<ChoiceRow> =
            answers.iter().enumerate().map(|(index, answer)| ChoiceRow::of(index, answer, &pending.job)).collect();
        let completion_tokens: usize = answers.iter().map(|answer| answer.tokens.len()).sum();
        let times = answers[0].timings;
        self.report.answers += 1;
        self.report.tokens += completion_tokens;
        self.report.prompt_tokens += answers[0].prompt_tokens;
        self.report.cached_tokens += answers[0].cached_tokens;
        let several = rows.len() > 1;
        let mut rows = rows.into_iter();
        let first = rows.next().expect("at least one answer");
        let line = AnswerLine {
            line: pending.line,
            id: pending.id,
            usage: Usage {
                prompt_tokens: answers[0].prompt_tokens,
                completion_tokens,
                total_tokens: answers[0].prompt_tokens + completion_tokens,
                cached_tokens: answers[0].cached_tokens,
            },
            timings: Timings {
                first_token_seconds: times.first_token_seconds,
                decode_seconds: times.decode_seconds,
                total_seconds: answers.iter().map(|answer| answer.timings.total_seconds).fold(0.0, f64::max),
            },
            choices: several.then(|| std::iter::once(first.clone()).chain(rows).collect()),
            first,
        };
        self.write(&line)
    }

    fn write_error(&mut self, line: usize, id: Option<Value>, message: &str) -> Result<()> {
        self.report.errors += 1;
        self.write(&ErrorLine { line, id, error: ErrorRow { message, kind: "invalid_request_error" } })
    }

    fn write(&mut self, line: &impl Serialize) -> Result<()> {
        let mut bytes = serde_json::to_vec(line)?;
        bytes.push(b'\n');
        self.file.write_all(&bytes).with_context(|| format!("cannot write {}", self.path.display()))?;
        self.answered += 1;
        self.bar.update(self.answered, self.total);
        Ok(())
    }
}

/// An answer as it is written.
#[derive(Debug, Serialize)]
struct AnswerLine {
    line: usize,
    #[serde(skip_serializing_if = "Option::is_none")]
    id: Option<Value>,
    #[serde(flatten)]
    first: ChoiceRow,
    /// All answers, where several were asked for.
    #[serde(skip_serializing_if = "Option::is_none")]
    choices: Option<Vec<ChoiceRow>>,
    usage: Usage,
    timings: Timings,
}

#[derive(Clone, Debug, Serialize)]
struct ChoiceRow {
    index: usize,
    tokens: Vec<u32>,
    text: String,
    /// Where tools could be called.
    #[serde(skip_serializing_if = "Option::is_none")]
    tool_calls: Option<Vec<ToolCall>>,
    finish_reason: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    logprobs: Option<Vec<TokenRow>>,
}

impl ChoiceRow {
    fn of(index: usize, answer: &Answer, job: &Job) -> ChoiceRow {
        let (text, tool_calls, finish_reason) = match job.form.tools {
            Some(format) => {
                let (text, calls, reason) = tools::read(&answer.text, format, answer.finish_reason, &CallIds::any());
                (text, Some(calls), reason)
            }
            None => (answer.text.clone(), None, answer.finish_reason.name()),
        };
        ChoiceRow {
            index,
            tokens: answer.tokens.iter().map(|token| token.id).collect(),
            text,
            tool_calls,
            finish_reason,
            logprobs: job.logprobs.then(|| answer.tokens.iter().map(TokenRow::of).collect()),
        }
    }
}

#[derive(Debug, Serialize)]
struct Usage {
    prompt_tokens: usize,
    completion_tokens: usize,
    total_tokens: usize,
    cached_tokens: usize,
}

#[derive(Debug, Serialize)]
struct Timings {
    first_token_seconds: f64,
    decode_seconds: f64,
    total_seconds: f64,
}

#[derive(Debug, Serialize)]
struct ErrorLine<'a> {
    line: usize,
    #[serde(skip_serializing_if = "Option::is_none")]
    id: Option<Value>,
    error: ErrorRow<'a>,
}

#[derive(Debug, Serialize)]
struct ErrorRow<'a> {
    message: &'a str,
    #[serde(rename = "type")]
    kind: &'a str,
}

/// What became of the file.
#[derive(Debug, Default, Serialize)]
struct BatchReport {
    out: String,
    /// Lines with a request.
    lines: usize,
    /// Answered in this run.
    answers: usize,
    /// Lines that got an error, in this run.
    errors: usize,
    /// Lines without an answer.
    left: usize,
    prompt_tokens: usize,
    cached_tokens: usize,
    tokens: usize,
    seconds: f64,
    load_seconds: f64,
    tokens_per_s: f64,
    stages: Vec<StageRow>,
    /// Stages that were lost, and what took their places.
    recoveries: Vec<Recovered>,
    /// Stages that took much longer than they used to.
    stragglers: Vec<Straggler>,
}

impl Report for BatchReport {
    fn text(&self) -> String {
        let errors = if self.errors > 0 { format!(", {} errors", self.errors) } else { String::new() };
        let left =
            if self.left > 0 { format!(", {} left: run the same command again", self.left) } else { String::new() };
        format!(
            "{}\n{}: {} answers{errors}{left}; {} prompt tokens ({} cached), {} tokens in {:.1} s: {:.1} tokens/s",
            stage_table(&self.stages, self.seconds),
            self.out,
            self.answers,
            self.prompt_tokens,
            self.cached_tokens,
            self.tokens,
            self.seconds,
            self.tokens_per_s
        )
    }
}
