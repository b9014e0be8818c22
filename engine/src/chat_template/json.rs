//! JSON for templates: values in, and out again through the `tojson` filter as transformers defines it over Python's
//! `json.dumps`.

use minijinja::value::{Kwargs, Rest, ValueKind};
use minijinja::{Error, ErrorKind, Value};
use serde_json::Value as Json;

/// Deepest nesting that is written, one more than `serde_json` reads.
const DEPTH_MAX: usize = 128;

/// The same value for a template; keys keep their order.
pub(super) fn to_template(json: &Json) -> Value {
    match json {
        Json::Null => Value::from(()),
        Json::Bool(flag) => Value::from(*flag),
        Json::Number(number) => match (number.as_u64(), number.as_i64()) {
            (Some(n), _) => Value::from(n),
            (None, Some(n)) => Value::from(n),
            (None, None) => Value::from(number.as_f64().unwrap_or(f64::NAN)),
        },
        Json::String(text) => Value::from(text.as_str()),
        Json::Array(items) => items.iter().map(to_template).collect(),
        Json::Object(map) => Value::from_pairs(map.iter().map(|(key, item)| (key.as_str(), to_template(item)))),
    }
}

/// `tojson(value, ensure_ascii=false, indent=none, separators=none, sort_keys=false)`; nothing is escaped for HTML.
pub(super) fn tojson(value: &Value, rest: Rest<Value>, kwargs: Kwargs) -> Result<String, Error> {
    let indent = kwargs.get::<Option<usize>>("indent")?;
    let separators = match kwargs.get::<Option<Vec<String>>>("separators")?.as_deref() {
        Some([item, key]) => (item.clone(), key.clone()),
        Some(_) => {
            return Err(Error::new(ErrorKind::InvalidOperation, "separators are two strings"));
        }
        None if indent.is_some() => (",".into(), ": ".into()),
        None => (", ".into(), ": ".into()),
    };
    let writer = Writer {
        ensure_ascii: kwargs.get::<Option<bool>>("ensure_ascii")?.unwrap_or(rest.first().is_some_and(Value::is_true)),
        // Deeper than any tool description; the bound keeps a template from asking for gigabytes of spaces.
        indent: indent.map(|spaces| spaces.min(64)),
        sort_keys: kwargs.get::<Option<bool>>("sort_keys")?.unwrap_or(false),
        separators,
    };
    kwargs.assert_all_used()?;
    let mut out = String::new();
    writer.write(value, 1, &mut out)?;
    Ok(out)
}

struct Writer {
    ensure_ascii: bool,
    indent: Option<usize>,
    sort_keys: bool,
    /// Between items, between key and value.
    separators: (String, String),
}

impl Writer {
    fn write(&self, value: &Value, depth: usize, out: &mut String) -> Result<(), Error> {
        if depth > DEPTH_MAX {
            return Err(Error::new(ErrorKind::InvalidOperation, "nested too deeply for JSON"));
        }
        match value.kind() {
            ValueKind::None => out.push_str("null"),
            ValueKind::Bool => out.push_str(if value.is_true() { "true" } else { "false" }),
            ValueKind::Number => out.push_str(&value.to_string()),
            ValueKind::String => self.string(value.as_str().unwrap_or_default(), out),
            ValueKind::Seq | ValueKind::Iterable => {
                self.list(('[', ']'), value.try_iter()?, depth, out, |item, out| self.write(&item, depth + 1, out))?;
            }
            ValueKind::Map => {
                let mut keys: Vec<Value> = value.try_iter()?.collect();
                if self.sort_keys {
                    keys.sort();
                }
                self.list(('{', '}'), keys.into_iter(), depth, out, |key, out| {
                    self.string(&key.to_string(), out);
                    out.push_str(&self.separators.1);
                    self.write(&value.get_item(&key)?, depth + 1, out)
                })?;
            }
            other => {
                let message = format!("a value of type {other} cannot be written as JSON");
                return Err(Error::new(ErrorKind::BadSerialization, message));
            }
        }
        Ok(())
    }

    fn list<T>(
        &self,
        (open, close): (char, char),
        items: impl Iterator<Item = T>,
        depth: usize,
        out: &mut String,
        write: impl Fn(T, &mut String) -> Result<(), Error>,
    ) -> Result<(), Error> {
        out.push(open);
        let mut empty = true;
        for (position, item) in items.enumerate() {
            if position > 0 {
                out.push_str(&self.separators.0);
            }
            self.new_line(depth, out);
            write(item, out)?;
            empty = false;
        }
        if !empty {
            self.new_line(depth - 1, out);
        }
        out.push(close);
        Ok(())
    }

    fn new_line(&self, depth: usize, out: &mut String) {
        if let Some(spaces) = self.indent {
            out.push('\n');
            out.extend(std::iter::repeat_n(' ', spaces * depth));
        }
    }

    fn string(&self, text: &str, out: &mut String) {
        out.push('"');
        for letter in text.chars() {
            match letter {
                '"' => out.push_str("\\\""),
                '\\' => out.push_str("\\\\"),
                '\n' => out.push_str("\\n"),
                '\r' => out.push_str("\\r"),
                '\t' => out.push_str("\\t"),
                '\u{8}' => out.push_str("\\b"),
                '\u{c}' => out.push_str("\\f"),
                letter if letter < ' ' || (self.ensure_ascii && !(' '..='~').contains(&letter)) => {
                    let units = letter
                        .encode_utf16(&mut [0; 2])
                        .iter()
                        .map(|unit| format!("\\u{unit:04x}"))
                        .collect::<String>();
                    out.push_str(&units);
                }
                letter => out.push(letter),
            }
        }
        out.push('"');
    }
}
