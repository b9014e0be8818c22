//! What can be set while a conversation goes on.

use anyhow::Result;
use clap::ValueEnum;
use pp_engine::checkpoint::GenerationDefaults;
use pp_engine::sampler::Sampling;
use serde_json::{Map, Value};

use super::commands::{nearest, shortened};
use crate::args::{ContextPolicy, SamplingArgs, ThoughtsArg};
use crate::errors::usage;
use crate::output::table;
use crate::settings;

/// All names, as options have them but for the underscores.
pub const NAMES: [&str; 13] = [
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repeat_penalty",
    "presence_penalty",
    "frequency_penalty",
    "seed",
    "max_tokens",
    "stop",
    "thoughts",
    "context_policy",
    "template_arg",
];

/// What is set.
#[derive(Clone, Debug, Default)]
pub struct Choices {
    /// As typed; the seed is there always.
    pub sampling: SamplingArgs,
    /// Variables for the chat template.
    pub template_args: Map<String, Value>,
    /// How thoughts are shown.
    pub thoughts: ThoughtsArg,
    /// What happens when the context is full.
    pub policy: ContextPolicy,
}

impl Choices {
    /// How tokens are chosen, by a model that declares these defaults.
    ///
    /// # Errors
    /// Names what is out of range.
    pub fn sampling(&self, declared: &GenerationDefaults) -> Result<Sampling> {
        settings::sampling(&self.sampling, declared, self.seed(), 0)
    }

    /// The seed.
    pub fn seed(&self) -> u64 {
        self.sampling.seed.unwrap_or_default()
    }

    /// Another seed than before.
    pub fn reseed(&mut self) {
        self.sampling.seed = Some(self.seed().wrapping_add(1));
    }

    /// Sets what `NAME=VALUE` says; without a value a name is as the model has it. Returns what it is now, for people.
    ///
    /// # Errors
    /// When there is no such name, or the value is none; nothing changes then.
    pub fn set(&mut self, typed: &str, declared: &GenerationDefaults) -> Result<String> {
        let (name, value) = typed.split_once('=').ok_or_else(|| {
            usage(format!("/set {}: expected NAME=VALUE, as in /set temperature=0.7", shortened(typed)))
        })?;
        let (name, value) = (name.trim().to_lowercase().replace('-', "_"), value.trim());
        let mut next = self.clone();
        let s = &mut next.sampling;
        match name.as_str() {
            "temperature" => s.temperature = number(&name, value)?,
            "top_k" => s.top_k = number(&name, value)?,
            "top_p" => s.top_p = number(&name, value)?,
            "min_p" => s.min_p = number(&name, value)?,
            "repeat_penalty" => s.repeat_penalty = number(&name, value)?,
            "presence_penalty" => s.presence_penalty = number(&name, value)?,
            "frequency_penalty" => s.frequency_penalty = number(&name, value)?,
            "seed" => s.seed = Some(number(&name, value)?.ok_or_else(|| usage("/set seed=: expected a number"))?),
            "max_tokens" => {
                s.max_tokens = number(&name, value)?.ok_or_else(|| usage("/set max_tokens=: expected a number"))?;
            }
            "stop" => s.stop = if value.is_empty() { Vec::new() } else { vec![text(value)] },
            "thoughts" => next.thoughts = one_of(&name, value)?,
            "context_policy" => next.policy = one_of(&name, value)?,
            "template_arg" => next.template_args.extend(settings::template_args(&[value.to_owned()])?),
            _ => {
                let like = nearest(&name, NAMES.into_iter());
                let like = like.map_or(String::new(), |like| format!("; did you mean {like}?"));
                return Err(usage(format!("/set {}: there is no such name{like} /set lists them", shortened(&name))));
            }
        }
        // Errors name options.
        next.sampling(declared).map_err(|error| usage(error.to_string().replace("--", "/set ")))?;
        *self = next;
        let now = NAMES.iter().zip(self.values(declared)?).find(|(known, _)| **known == name);
        Ok(now.map_or(name.clone(), |(_, value)| {
            format!("{name} is {}", if value.is_empty() { "empty" } else { &value })
        }))
    }

    /// All of it, for people.
    ///
    /// # Errors
    /// As [`Choices::sampling`].
    pub fn text(&self, declared: &GenerationDefaults) -> Result<String> {
        let values = self.values(declared)?.into_iter();
        let rows: Vec<Vec<String>> =
            NAMES.iter().zip(values).map(|(name, value)| vec![(*name).to_owned(), value]).collect();
        Ok(table(2, &["name", "value"], &rows))
    }

    /// The values of all [`NAMES`].
    fn values(&self, declared: &GenerationDefaults) -> Result<[String; NAMES.len()]> {
        let s = self.sampling(declared)?;
        let named =
            |value: Option<clap::builder::PossibleValue>| value.map_or(String::new(), |v| v.get_name().to_owned());
        Ok([
            s.temperature.to_string(),
            s.top_k.to_string(),
            s.top_p.to_string(),
            s.min_p.to_string(),
            s.repetition_penalty.to_string(),
            s.presence_penalty.to_string(),
            s.frequency_penalty.to_string(),
            s.seed.to_string(),
            self.sampling.max_tokens.to_string(),
            self.sampling.stop.iter().map(|stop| format!("{stop:?}")).collect::<Vec<_>>().join(" "),
            named(self.thoughts.to_possible_value()),
            named(self.policy.to_possible_value()),
            Value::from(self.template_args.clone()).to_string(),
        ])
    }
}

/// A number, or nothing where there is none.
fn number<T: std::str::FromStr>(name: &str, value: &str) -> Result<Option<T>> {
    if value.is_empty() {
        return Ok(None);
    }
    let parsed = value.parse().map(Some);
    parsed.map_err(|_| usage(format!("/set {name}={}: that is no number that it takes", shortened(value))))
}

/// A text: as JSON has it, where it is quoted.
fn text(value: &str) -> String {
    serde_json::from_str(value).unwrap_or_else(|_| value.to_owned())
}

fn one_of<T: ValueEnum>(name: &str, value: &str) -> Result<T> {
    T::from_str(&value.replace('_', "-"), true).map_err(|_| {
        let values = T::value_variants().iter().filter_map(ValueEnum::to_possible_value);
        let values: Vec<String> = values.map(|value| value.get_name().to_owned()).collect();
        usage(format!("/set {name}={}: expected one of {}", shortened(value), values.join(", ")))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fresh() -> Choices {
        let sampling = SamplingArgs { seed: Some(5), max_tokens: 64, ..SamplingArgs::default() };
        Choices { sampling, ..Choices::default() }
    }

    #[test]
    fn what_is_set_counts_and_can_be_left_to_the_model_again() {
        let declared = GenerationDefaults { temperature: Some(0.6), top_k: Some(20), ..GenerationDefaults::default() };
        let mut choices = fresh();
        assert_eq!(choices.sampling(&declared).unwrap().temperature, 0.6);
        for typed in ["temperature=0.25", "top-p = 0.5", "SEED=9", "stop=\"\\n\\n\"", "context_policy=drop-oldest"] {
            choices.set(typed, &declared).unwrap();
        }
        assert_eq!(choices.set("thoughts=hide", &declared).unwrap(), "thoughts is hide");
        choices.set("template_arg=enable_thinking=false", &declared).unwrap();
        let sampling = choices.sampling(&declared).unwrap();
        assert_eq!((sampling.temperature, sampling.top_p, sampling.top_k, sampling.seed), (0.25, 0.5, 20, 9));
        assert_eq!((&choices.sampling.stop[..], choices.thoughts), (&["\n\n".to_owned()][..], ThoughtsArg::Hide));
        assert_eq!(
            (choices.policy, &choices.template_args["enable_thinking"]),
            (ContextPolicy::DropOldest, &false.into())
        );
        assert_eq!(choices.set("temperature=", &declared).unwrap(), "temperature is 0.6");
        assert_eq!(choices.sampling(&declared).unwrap().temperature, 0.6);
        let text = choices.text(&declared).unwrap();
        for part in ["temperature", "0.6", "drop-oldest", r#"{"enable_thinking":false}"#, r#""\n\n""#] {
            assert!(text.contains(part), "{part}: {text}");
        }
    }

    #[test]
    fn what_cannot_be_set_changes_nothing_and_is_told() {
        let declared = GenerationDefaults::default();
        let mut choices = fresh();
        let mut refused = |typed: &str, wanted: &str| {
            let message = choices.set(typed, &declared).unwrap_err().to_string();
            assert!(message.contains(wanted), "{typed}: {message}");
            assert_eq!(format!("{choices:?}"), format!("{:?}", fresh()), "{typed}");
        };
        refused("temperature", "expected NAME=VALUE");
        refused("temprature=1", "did you mean temperature?");
        refused("xyzzy=1", "there is no such name");
        refused("temperature=warm", "no number");
        refused("temperature=-1", "/set temperature -1: expected 0 to 100");
        refused("top_p=0", "/set top-p 0");
        refused("top_k=-3", "no number");
        refused("max_tokens=0", "at least 1");
        refused("max_tokens=", "expected a number");
        refused("stop=\"\"", "empty text");
        refused("thoughts=loud", "expected one of dim, show, hide");
        refused("template_arg=x", "expected KEY=VALUE");
    }
}
