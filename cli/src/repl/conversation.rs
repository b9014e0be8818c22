//! What has been said so far, and what can be done about it. Files hold it as OpenAI's API has it.

use std::fs::File;
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use pp_engine::chat_template::Message;
use serde::Deserialize;
use serde_json::{Value, json};

use crate::errors::usage;

/// Bytes of a file at most.
const FILE_BYTES_MAX: u64 = 32 << 20;
/// Messages of a file at most.
const MESSAGES_MAX: usize = 100_000;

const SYSTEM: &str = "system";
const USER: &str = "user";
const ASSISTANT: &str = "assistant";

/// A conversation: a system message, if there is one, and what came then. Its last message has no answer yet, or is one.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Conversation {
    messages: Vec<Message>,
}

impl Conversation {
    /// Empty but for a system message.
    pub fn new(system: Option<String>) -> Conversation {
        Conversation { messages: system.map(|text| Message::new(SYSTEM, text)).into_iter().collect() }
    }

    /// All messages.
    pub fn messages(&self) -> &[Message] {
        &self.messages
    }

    /// The system message.
    pub fn system(&self) -> Option<&str> {
        self.messages.first().filter(|first| first.role == SYSTEM).map(|first| first.content.as_str())
    }

    /// Sets the system message, or removes it.
    pub fn set_system(&mut self, text: Option<String>) {
        self.messages.drain(..self.begin());
        self.messages.splice(0..0, text.map(|text| Message::new(SYSTEM, text)));
    }

    /// Where what was said begins.
    fn begin(&self) -> usize {
        usize::from(self.system().is_some())
    }

    /// Forgets all but the system message.
    pub fn reset(&mut self) {
        self.messages.truncate(self.begin());
    }

    /// The last message, where it has no answer.
    pub fn unanswered(&self) -> Option<&str> {
        self.messages.last().filter(|last| last.role == USER).map(|last| last.content.as_str())
    }

    /// Adds a message, in the place of one that has no answer: true where there was one.
    pub fn say(&mut self, text: String) -> bool {
        let replaces = self.unanswered().is_some();
        if replaces {
            self.messages.pop();
        }
        self.messages.push(Message::new(USER, text));
        replaces
    }

    /// Adds the answer to the last message.
    pub fn answer(&mut self, text: String) {
        self.messages.push(Message::new(ASSISTANT, text));
    }

    fn last_of_user(&self) -> Option<usize> {
        self.messages.iter().rposition(|message| message.role == USER)
    }

    /// The last message of the user.
    pub fn last_said(&self) -> Option<&str> {
        self.last_of_user().map(|at| self.messages[at].content.as_str())
    }

    /// Takes the last message of the user back, with what came after it: false where there is none.
    pub fn undo(&mut self) -> bool {
        let at = self.last_of_user();
        self.messages.truncate(at.unwrap_or(self.messages.len()));
        at.is_some()
    }

    /// Takes back what came after the last message of the user: false where there is no such message.
    pub fn forget_answer(&mut self) -> bool {
        let at = self.last_of_user();
        self.messages.truncate(at.map_or(self.messages.len(), |at| at + 1));
        at.is_some()
    }

    /// Drops the oldest message of the user and what answered it; the number of messages dropped. The last message of
    /// the user stays.
    pub fn drop_oldest(&mut self) -> usize {
        let begin = self.begin();
        // The oldest may have no question before it, in a conversation that was loaded.
        let Some(next) = (begin + 1..self.messages.len()).find(|at| self.messages[*at].role == USER) else { return 0 };
        self.messages.drain(begin..next);
        next - begin
    }

    /// Writes it to a file, all or nothing: `{"model", "messages"}`, which can be sent to a server as it is.
    ///
    /// # Errors
    /// When there is a file that is no conversation, or the system does not write.
    pub fn save(&self, path: &Path, model: &str) -> Result<()> {
        if is_there(path)
            && let Err(error) = Conversation::load(path)
        {
            return Err(usage(format!("{} is left as it is: {error:#}; choose another name", path.display())));
        }
        let write = || -> io::Result<()> {
            let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
            // Readable by its owner only, as it is made.
            let mut file = tempfile::NamedTempFile::new_in(folder)?;
            serde_json::to_writer_pretty(&mut file, &self.to_json(model))?;
            file.write_all(b"\n")?;
            file.as_file().sync_all()?;
            file.persist(path)?;
            Ok(())
        };
        write().with_context(|| format!("cannot write {}", path.display()))
    }

    fn to_json(&self, model: &str) -> Value {
        let message = |m: &Message| json!({"role": m.role, "content": m.content});
        json!({"model": model, "messages": self.messages.iter().map(message).collect::<Vec<_>>()})
    }

    /// Of a file that [`Conversation::save`] wrote, or any other with messages in OpenAI's form.
    ///
    /// # Errors
    /// What is wrong with it, and where.
    pub fn load(path: &Path) -> Result<Conversation> {
        let unread = |error: io::Error| usage(format!("cannot read {}: {error}", path.display()));
        let mut bytes = Vec::new();
        let file = File::open(path).map_err(unread)?;
        file.take(FILE_BYTES_MAX + 1).read_to_end(&mut bytes).map_err(unread)?;
        if bytes.len() as u64 > FILE_BYTES_MAX {
            return Err(usage(format!("{} has more than {FILE_BYTES_MAX} bytes", path.display())));
        }
        let messages = parse(&bytes).map_err(|what| usage(format!("{} is no conversation: {what}", path.display())))?;
        Ok(Conversation { messages })
    }
}

fn is_there(path: &Path) -> bool {
    std::fs::metadata(path).is_ok_and(|file| file.len() > 0)
}

#[derive(Deserialize)]
#[serde(untagged)]
enum Document {
    Request { messages: Vec<Saved> },
    Messages(Vec<Saved>),
}

#[derive(Deserialize)]
struct Saved {
    role: String,
    content: Content,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum Content {
    Text(String),
    Parts(Vec<Part>),
}

#[derive(Deserialize)]
struct Part {
    #[serde(rename = "type")]
    kind: String,
    text: Option<String>,
}

fn parse(bytes: &[u8]) -> Result<Vec<Message>, String> {
    // What is no JSON at all is told with its place.
    let value: Value = serde_json::from_slice(bytes).map_err(|error| error.to_string())?;
    let document: Document = serde_json::from_value(value).map_err(|_| {
        "expected {\"messages\": [{\"role\": …, \"content\": …}, …]}, with texts as contents".to_owned()
    })?;
    let (Document::Request { messages } | Document::Messages(messages)) = document;
    if messages.len() > MESSAGES_MAX {
        return Err(format!("it has {} messages, at most {MESSAGES_MAX} may be", messages.len()));
    }
    let message = |(at, saved): (usize, Saved)| {
        let known = [SYSTEM, USER, ASSISTANT].contains(&saved.role.as_str());
        if !known || (saved.role == SYSTEM && at > 0) {
            let expected = "user and assistant, after one of system at most";
            return Err(format!("message {} is of `{}`; expected {expected}", at + 1, saved.role));
        }
        let content = match saved.content {
            Content::Text(text) => text,
            Content::Parts(parts) => parts
                .into_iter()
                .map(|part| part.text.filter(|_| part.kind == "text").ok_or(part.kind))
                .collect::<Result<String, String>>()
                .map_err(|kind| format!("message {} has a part of type `{kind}`; only text is understood", at + 1))?,
        };
        Ok(Message::new(saved.role, content))
    };
    messages.into_iter().enumerate().map(message).collect()
}

/// A path as typed: `~/` is the home folder.
pub fn path(typed: &str) -> PathBuf {
    let home = typed.strip_prefix("~/").and_then(|rest| Some(Path::new(&std::env::var_os("HOME")?).join(rest)));
    home.unwrap_or_else(|| PathBuf::from(typed))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn said(conversation: &Conversation) -> String {
        let letter = |message: &Message| format!("{}:{}", &message.role[..1], message.content);
        conversation.messages().iter().map(letter).collect::<Vec<_>>().join(" ")
    }

    fn three_turns() -> Conversation {
        let mut conversation = Conversation::new(Some("S".to_owned()));
        for turn in ["1", "2", "3"] {
            conversation.say(turn.to_owned());
            conversation.answer(format!("a{turn}"));
        }
        conversation
    }

    #[test]
    fn the_last_turn_can_be_taken_back_answered_again_or_replaced() {
        let mut conversation = three_turns();
        assert!(conversation.forget_answer());
        assert_eq!(conversation.unanswered(), Some("3"));
        assert!(conversation.say("4".to_owned()), "a message without an answer is replaced");
        assert_eq!(said(&conversation), "s:S u:1 a:a1 u:2 a:a2 u:4");
        assert!(conversation.undo());
        assert!(conversation.undo());
        assert_eq!((said(&conversation).as_str(), conversation.last_said()), ("s:S u:1 a:a1", Some("1")));
        assert!(conversation.undo() && !conversation.undo());
        assert!(!conversation.forget_answer());
        assert_eq!(said(&conversation), "s:S");
    }

    #[test]
    fn the_oldest_turns_can_be_dropped_but_not_the_last() {
        let mut conversation = three_turns();
        conversation.say("4".to_owned());
        assert_eq!(conversation.drop_oldest(), 2);
        assert_eq!(said(&conversation), "s:S u:2 a:a2 u:3 a:a3 u:4");
        assert_eq!((conversation.drop_oldest(), conversation.drop_oldest(), conversation.drop_oldest()), (2, 2, 0));
        assert_eq!(said(&conversation), "s:S u:4");
        let mut odd = Conversation { messages: vec![Message::new(ASSISTANT, "hi"), Message::new(USER, "1")] };
        assert_eq!((odd.drop_oldest(), odd.drop_oldest()), (1, 0));
        assert_eq!(said(&odd), "u:1");
    }

    #[test]
    fn the_system_message_can_be_set_and_removed_at_any_time() {
        let mut conversation = three_turns();
        conversation.set_system(Some("T".to_owned()));
        assert_eq!(conversation.system(), Some("T"));
        conversation.set_system(None);
        assert_eq!(said(&conversation), "u:1 a:a1 u:2 a:a2 u:3 a:a3");
        conversation.set_system(Some("U".to_owned()));
        conversation.reset();
        assert_eq!(said(&conversation), "s:U");
    }

    #[test]
    fn what_is_saved_is_loaded_and_other_files_are_left_alone() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("talk.json");
        let mut conversation = three_turns();
        conversation.say("é\n\u{1b} \"<|im_end|>\"".to_owned());
        conversation.save(&file, "model").unwrap();
        assert_eq!(Conversation::load(&file).unwrap(), conversation);
        conversation.reset();
        conversation.save(&file, "model").unwrap();
        assert_eq!(Conversation::load(&file).unwrap(), conversation, "a conversation is written over");
        let other = dir.path().join("other");
        std::fs::write(&other, "#!/bin/sh\n").unwrap();
        let message = conversation.save(&other, "model").unwrap_err().to_string();
        assert!(message.contains("left as it is") && message.contains("choose another name"), "{message}");
        assert_eq!(std::fs::read(&other).unwrap(), b"#!/bin/sh\n");
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 2, "nothing unfinished is left");
        assert!(conversation.save(&dir.path().join("no/such.json"), "model").is_err());
    }

    #[test]
    fn messages_come_in_every_form_that_openai_has_for_texts() {
        let check = |text: &str, expected: &str| {
            assert_eq!(said(&Conversation { messages: parse(text.as_bytes()).unwrap() }), expected);
        };
        check(r#"[{"role": "user", "content": "1"}]"#, "u:1");
        check(r#"{"model": "m", "messages": [{"role": "system", "content": "S"}], "temperature": 1}"#, "s:S");
        let parts = r#"[{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]"#;
        check(parts, "u:ab");
        let refused = |text: &str, wanted: &str| {
            let message = parse(text.as_bytes()).unwrap_err();
            assert!(message.contains(wanted), "{message}");
        };
        refused("{\"messages\": [", "EOF");
        refused("{}", "expected {\"messages\"");
        refused(r#"[{"role": "user", "content": null}]"#, "texts as contents");
        refused(r#"[{"role": "tool", "content": "x"}]"#, "message 1 is of `tool`");
        refused(
            r#"[{"role": "user", "content": "x"}, {"role": "system", "content": "x"}]"#,
            "message 2 is of `system`",
        );
        refused(r#"[{"role": "user", "content": [{"type": "image_url"}]}]"#, "part of type `image_url`");
    }
}
