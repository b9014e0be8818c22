//! Has the layers of a pipeline that runs divided otherwise: tells one of its workers, whose head hears it.

use std::process::ExitCode;
use std::sync::atomic::Ordering;
use std::time::Duration;

use anyhow::Result;
use pp_engine::cluster::control::Purpose;
use pp_engine::cluster::remote::Worker;
use pp_transport::identity::Name;
use pp_transport::members::Member;
use serde::Serialize;

use super::every;
use crate::args::RebalanceArgs;
use crate::cancel;
use crate::cluster::gather::DIAL;
use crate::cluster::{Here, lease_error};
use crate::errors::{self, usage};
use crate::output::{Out, Report};

/// How often it is asked what has come of it.
const LOOK: Duration = Duration::from_millis(100);
/// After how many of these a word is said of waiting.
const LONG: usize = 50;

/// Does what was asked.
pub fn run(args: &RebalanceArgs) -> Result<ExitCode> {
    let out = Out::new(args.output.json, false);
    let here = Here::open()?;
    let node = here.node()?;
    let members: Vec<Member> = match &args.name {
        Some(name) => {
            let name: Name =
                name.parse().map_err(|error: pp_transport::identity::NameError| usage(error.to_string()))?;
            vec![here.worker(&name)?.clone()]
        }
        None => here.workers().cloned().collect(),
    };
    let held = |worker: &Worker| Ok(worker.welcome().holder.clone().filter(|holder| !holder.stages.is_empty()));
    let found = every(&node, &members, &here.greeting(), held);
    if let ([_], [Err(_)]) = (&members[..], &found[..]) {
        let error = found.into_iter().find_map(Result::err).expect("it was asked");
        return Err(lease_error(error));
    }
    let held = members.iter().zip(found).filter_map(|(member, holder)| Some((member, holder.ok().flatten()?)));
    let held: Vec<_> = held.collect();
    let Some((member, holder)) = held.first() else {
        let nothing = match &args.name {
            Some(name) => format!("{name} runs no stage"),
            None => "no worker of this cluster that is within reach runs a stage".to_owned(),
        };
        return Err(errors::worker(format!("{nothing}: there is nothing to divide")));
    };
    if let Some((other, of)) = held.iter().find(|(_, other)| other.head != holder.head) {
        return Err(usage(format!(
            "several pipelines run: {} is {}'s, {} is {}'s; name a worker of the one that is meant",
            member.name, holder.head, other.name, of.head
        )));
    }
    let worker = Worker::connect(&node, member, &here.greeting(), Purpose::Look, DIAL).map_err(lease_error)?;
    let number = worker.rebalance(&args.split).map_err(lease_error)?;
    let text = wait(&worker, number, &holder.head, &out)?;
    let split = args.split.iter().map(|count| *count as usize).collect::<Vec<_>>();
    out.result(&Rebalanced { split, head: holder.head.clone(), outcome: text })?;
    Ok(ExitCode::SUCCESS)
}

/// Until it is known what has come of it.
fn wait(worker: &Worker, number: u64, head: &str, out: &Out) -> Result<String> {
    for looks in 0.. {
        match worker.rebalanced(number).map_err(lease_error)? {
            Some(Ok(text)) => return Ok(text),
            Some(Err(reason)) => return Err(errors::worker(format!("the layers stay as they are: {reason}"))),
            None if cancel::flag().load(Ordering::Relaxed) => return Err(errors::cancelled()),
            None => {}
        }
        if looks == LONG {
            out.note(&format!("waiting for {head}; a conversation divides its layers with its next message"));
        }
        std::thread::sleep(LOOK);
    }
    unreachable!("it waits until there is an answer")
}

#[derive(Debug, Serialize)]
struct Rebalanced {
    split: Vec<usize>,
    head: String,
    outcome: String,
}

impl Report for Rebalanced {
    fn text(&self) -> String {
        let Rebalanced { split, head, outcome } = self;
        format!("{head} runs with {} layers on its stages: {outcome}", pp_engine::split::join(split))
    }
}
