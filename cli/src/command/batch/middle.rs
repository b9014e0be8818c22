//! Answers of a batch that are not complete, in a journal: a run that died in their middle is gone on with from there.

use std::collections::{BTreeMap, HashMap};

use anyhow::Result;
use pp_engine::digest::Digest;
use pp_engine::head::{Head, Token};
use pp_engine::journal::{Asked, Contents, Found, Journal, Number, Refusal};
use pp_engine::schedule::{Choice, RequestId};
use serde::{Deserialize, Serialize};

use super::Line;
use crate::args::BatchArgs;
use crate::output::Out;
use crate::{journaled, report};

/// How a line was asked, as the journal has it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
struct Stored {
    line: usize,
    /// The digest of what it and the options say.
    wanted: String,
}

/// A journal of what runs. Without one it does nothing.
pub struct Middle {
    journal: Option<Journal>,
    model: Digest,
    conditions: String,
    context: usize,
    /// What the journal has of lines that do not run now.
    found: HashMap<usize, (Number, Found)>,
    running: HashMap<RequestId, Running>,
    /// Whether it was said that the journal cannot be written.
    has_told: bool,
}

struct Running {
    number: Number,
    found: Found,
    /// Tokens of each answer that were heard in this run.
    heard: Vec<usize>,
}

impl Middle {
    /// Opens the journal, if one is wanted. What is in it is of this model, else it is an error.
    pub fn open(args: &BatchArgs, model: impl FnOnce() -> Result<Digest>, out: &Out) -> Result<Middle> {
        let mut middle = Middle {
            journal: None,
            model: Digest::default(),
            conditions: String::new(),
            context: usize::MAX,
            found: HashMap::new(),
            running: HashMap::new(),
            has_told: false,
        };
        let Some(path) = &args.journal else { return Ok(middle) };
        let (journal, contents) = journaled::open(path, args.journal_bytes, out)?;
        middle.model = model()?;
        journaled::check_model(&contents, middle.model, path)?;
        for (number, found) in contents.requests {
            match serde_json::from_slice::<Stored>(&found.asked.body) {
                Ok(stored) => drop(middle.found.insert(stored.line, (number, found))),
                // Of a server.
                Err(_) => {
                    return Err(crate::errors::usage(format!(
                        "the journal {} is not of a batch: give another --journal",
                        path.display()
                    )));
                }
            }
        }
        middle.journal = Some(journal);
        Ok(middle)
    }

    /// Forgets lines that are answered, or say something else now.
    pub fn keep(&mut self, is_wanted: impl Fn(usize, &str) -> bool) {
        let Some(journal) = &self.journal else { return };
        self.found.retain(|line, (number, found)| {
            let stored = serde_json::from_slice::<Stored>(&found.asked.body);
            let stays = stored.is_ok_and(|stored| is_wanted(*line, &stored.wanted));
            if !stays {
                journal.forget(*number);
            }
            stays
        });
    }

    /// Lines whose answers have begun.
    pub fn begun(&self) -> usize {
        self.found.len()
    }

    /// Goes on with a head: under conditions that may be others.
    pub fn with(&mut self, head: &Head, precision: (&str, &str, &str), out: &Out) {
        self.context = head.scheduler().limits().capacity();
        self.conditions = journaled::conditions(precision, self.context, &report::stages(head.pipeline()));
        let requests = self.found.values().map(|(number, found)| (*number, found.clone())).collect();
        journaled::note_conditions(&Contents { requests, ..Contents::default() }, &self.conditions, out);
    }

    /// What there is of a line: its prompt's ids, and the tokens of its answers.
    pub fn of(&self, line: usize) -> Option<(Vec<u32>, Vec<Vec<Token>>)> {
        let (_, found) = self.found.get(&line)?;
        let prompt = found.asked.prompts.first()?.clone();
        Some((prompt, found.begun(0, found.asked.choices as usize)))
    }

    /// Whether the journal has room for a line; where it is only full with others, that is to be waited for.
    pub fn must_wait(&self, line: &Line) -> bool {
        let Some(journal) = self.journal.as_ref().filter(|_| !self.found.contains_key(&line.number)) else {
            return false;
        };
        let asked = self.asked(line);
        let is_full = asked.is_some_and(|asked| matches!(journal.room(&asked), Err(Refusal::Full { .. })));
        is_full && !self.running.is_empty()
    }

    fn asked(&self, line: &Line) -> Option<Asked> {
        let job = line.job.as_ref().ok()?;
        let stored = Stored { line: line.number, wanted: line.wanted.clone() };
        Some(Asked {
            name: line.number.to_string(),
            body: serde_json::to_vec(&stored).ok()?,
            model: self.model,
            conditions: self.conditions.clone(),
            prompts: vec![job.request.prompt.clone()],
            choices: job.request.choices.max(1),
            tokens_max: job.request.max_tokens.min(self.context) as u64,
            candidates: job.logprobs.then_some(job.request.sampling.candidates),
        })
    }

    /// A line runs. Where it cannot be written down, it runs all the same, and that is said once.
    pub fn runs(&mut self, request: RequestId, line: &Line, out: &Out) {
        let Some(journal) = &self.journal else { return };
        let known = self.found.remove(&line.number).map(Ok);
        let begun = known.or_else(|| {
            let asked = self.asked(line)?;
            let number = journal.ask(asked.clone(), || ());
            let found = Found { asked, tokens: BTreeMap::new(), is_complete: false };
            Some(number.map(|number| (number, found)))
        });
        match begun {
            Some(Ok((number, found))) => {
                let heard = vec![0; found.asked.choices as usize];
                self.running.insert(request, Running { number, found, heard });
            }
            Some(Err(refusal)) => self.tell(&refusal.to_string(), out),
            None => {}
        }
    }

    fn tell(&mut self, reason: &str, out: &Out) {
        if !std::mem::replace(&mut self.has_told, true) {
            out.note(&format!("{reason}. Answers go on; those that are not in the journal begin again after a crash"));
        }
    }

    /// Another token.
    pub fn token(&mut self, choice: Choice, token: Token) {
        let (Some(journal), Some(running)) = (&self.journal, self.running.get_mut(&choice.request)) else { return };
        let heard = &mut running.heard[choice.index as usize];
        let tokens = running.found.tokens.entry(choice.index).or_default();
        if *heard == tokens.len() {
            journal.tokens(running.number, choice.index, *heard, std::slice::from_ref(&token));
            tokens.push(token);
        }
        *heard += 1;
    }

    /// A line is answered.
    pub fn ended(&mut self, request: RequestId, out: &Out) {
        let Some(journal) = &self.journal else { return };
        if let Some(running) = self.running.remove(&request) {
            journal.forget(running.number);
        }
        if let Some(reason) = journal.standing().failing {
            self.tell(&format!("the journal cannot be written: {reason}"), out);
        }
    }
}
