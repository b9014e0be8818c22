//! What grammars of strangers may be. The compiler takes time that grows with the square of what stands side by side, with
//! every state of a pattern, and with every remainder of a division; within these bounds it takes some 100 ms at most.

use serde_json::{Number, Value};

use super::{ConstraintError, Grammar};

/// Longest JSON Schema, in bytes.
pub const SCHEMA_BYTES_MAX: usize = 128 << 10;
/// Longest regular expression, and longest grammar in Lark's syntax.
pub const TEXT_BYTES_MAX: usize = 4 << 10;
/// Longest text that is made of several schemas, for tools.
const MADE_BYTES_MAX: usize = 512 << 10;
/// Deepest nesting of brackets; the compilers recurse.
const DEPTH_MAX: usize = 64;
/// Members of one object, such as properties, and of one array, other than the values of an `enum`.
const MEMBERS_MAX: usize = 1000;
/// All patterns of a schema.
const PATTERN_BYTES_MAX: usize = 4 << 10;
/// Patterns that a text may have to match all at once: those of a schema that combines others (`allOf`, and the like), or
/// of a grammar with `&`. What the compiler does for each more is a multiple.
const COMBINED_MAX: usize = 8;
/// Keys of one `patternProperties`: each is compared with each.
const PATTERN_KEYS_MAX: usize = 16;
/// What all `multipleOf` of a schema have in common as least multiple, in units of their last digit.
const MULTIPLE_MAX: u64 = 10_000;
/// Digits behind the point of a `multipleOf`.
const DIGITS_MAX: u32 = 6;

/// Whether a grammar is one that may be compiled.
pub(super) fn check(grammar: &Grammar) -> Result<(), ConstraintError> {
    match grammar {
        Grammar::JsonObject => Ok(()),
        Grammar::JsonSchema(schema) => check_schema(schema),
        Grammar::Regex(text) => check_text(grammar.what(), text),
        Grammar::Lark(text) => {
            check_text(grammar.what(), text)?;
            most(grammar.what(), text.matches('&').count() + 1, "patterns that are combined", COMBINED_MAX)?;
            if text.contains("%json") {
                let message = "%json is not taken: a JSON schema goes without a grammar".to_owned();
                return Err(ConstraintError::Invalid { what: grammar.what(), message });
            }
            Ok(())
        }
        // Its schemas were looked at one by one.
        Grammar::Made(text) => most(grammar.what(), text.len(), "bytes", MADE_BYTES_MAX),
    }
}

fn check_text(what: &'static str, text: &str) -> Result<(), ConstraintError> {
    most(what, nesting(text), "levels of nesting", DEPTH_MAX)?;
    most(what, text.len(), "bytes", TEXT_BYTES_MAX)
}

/// Whether a schema is one that may be compiled.
pub(super) fn check_schema(schema: &Value) -> Result<(), ConstraintError> {
    let mut sums = Sums::default();
    sums.add("", schema, 1)?;
    most(SCHEMA, schema.to_string().len(), "bytes", SCHEMA_BYTES_MAX)?;
    most(SCHEMA, sums.pattern_bytes, "bytes of patterns", PATTERN_BYTES_MAX)?;
    let combined = if sums.combines { sums.patterns } else { 0 };
    most(SCHEMA, combined, "patterns beside schemas that are combined", COMBINED_MAX)?;
    match least_multiple(&sums.divisors) {
        Some(multiple) if multiple <= MULTIPLE_MAX => Ok(()),
        _ => Err(ConstraintError::Invalid {
            what: SCHEMA,
            message: format!(
                "multipleOf: the least common multiple of all is beyond {MULTIPLE_MAX} times their last digit, of at most \
                 {DIGITS_MAX} behind the point"
            ),
        }),
    }
}

const SCHEMA: &str = "the JSON schema";

fn most(what: &'static str, found: usize, unit: &'static str, max: usize) -> Result<(), ConstraintError> {
    if found <= max { Ok(()) } else { Err(ConstraintError::TooLarge { what, found, unit, max }) }
}

/// What adds up in a schema.
#[derive(Default)]
struct Sums {
    patterns: usize,
    pattern_bytes: usize,
    /// Whether one value may have to match several schemas.
    combines: bool,
    divisors: Vec<Number>,
}

impl Sums {
    /// Adds what stands behind `key`.
    fn add(&mut self, key: &str, value: &Value, depth: usize) -> Result<(), ConstraintError> {
        most(SCHEMA, depth, "levels of nesting", DEPTH_MAX)?;
        match value {
            Value::Array(items) => {
                let is_enum = key == "enum" && items.iter().all(|item| !item.is_array() && !item.is_object());
                most(SCHEMA, if is_enum { 0 } else { items.len() }, "members in one place", MEMBERS_MAX)?;
                items.iter().try_for_each(|item| self.add("", item, depth + 1))
            }
            Value::Object(map) => {
                most(SCHEMA, map.len(), "members in one place", MEMBERS_MAX)?;
                if key == "patternProperties" {
                    most(SCHEMA, map.len(), "patterns of properties in one place", PATTERN_KEYS_MAX)?;
                    map.keys().try_for_each(|pattern| self.add_pattern(pattern))?;
                }
                let alternatives = ["anyOf", "oneOf", "$ref"].iter().any(|key| map.contains_key(*key));
                self.combines |= map.contains_key("allOf") || (alternatives && map.contains_key("pattern"));
                map.iter().try_for_each(|(key, value)| self.add(key, value, depth + 1))
            }
            Value::String(text) if key == "pattern" => self.add_pattern(text),
            Value::Number(number) if key == "multipleOf" => {
                self.divisors.push(number.clone());
                Ok(())
            }
            _ => Ok(()),
        }
    }

    fn add_pattern(&mut self, text: &str) -> Result<(), ConstraintError> {
        self.patterns += 1;
        self.pattern_bytes += text.len();
        most(SCHEMA, nesting(text), "levels of nesting", DEPTH_MAX)
    }
}

/// Brackets that are open at once, at most; those in quotes count too.
fn nesting(text: &str) -> usize {
    let (mut open, mut most) = (0usize, 0);
    for byte in text.bytes() {
        match byte {
            b'(' | b'[' | b'{' => open += 1,
            b')' | b']' | b'}' => open = open.saturating_sub(1),
            _ => {}
        }
        most = most.max(open);
    }
    most
}

/// The least common multiple of numbers, in units of the last digit that any of them has; nothing where it is no number
/// that one would write.
fn least_multiple(numbers: &[Number]) -> Option<u64> {
    let scaled = |number: &Number, digits: u32| {
        let scaled = number.as_f64()? * 10f64.powi(digits as i32);
        let whole = scaled.round();
        ((scaled - whole).abs() <= whole.abs() * 1e-9 && (0.0..1e15).contains(&whole)).then_some(whole as u64)
    };
    let digits = (0..=DIGITS_MAX).find(|digits| numbers.iter().all(|number| scaled(number, *digits).is_some()))?;
    numbers.iter().try_fold(1u64, |multiple, number| {
        // What nothing is a multiple of is the compiler's to refuse.
        let number = scaled(number, digits)?.max(1);
        (multiple / common_divisor(multiple, number)).checked_mul(number)
    })
}

fn common_divisor(a: u64, b: u64) -> u64 {
    if b == 0 { a } else { common_divisor(b, a % b) }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn multiples_are_counted_in_their_last_digit() {
        let of = |numbers: &[Value]| {
            let number = |value: &Value| value.as_number().unwrap().clone();
            least_multiple(&numbers.iter().map(number).collect::<Vec<_>>())
        };
        assert_eq!(of(&[]), Some(1));
        assert_eq!(of(&[json!(6), json!(4)]), Some(12));
        assert_eq!(of(&[json!(0.01), json!(60)]), Some(6000));
        assert_eq!(of(&[json!(0.25), json!(0.1)]), Some(50));
        assert_eq!(of(&[json!(1e-9)]), None);
        assert_eq!(of(&[json!(1e300)]), None);
        assert_eq!(of(&[json!(999_999_937u64), json!(999_999_929u64), json!(999_999_893u64)]), None);
    }

    #[test]
    fn what_is_too_large_is_said() {
        let check = |schema: Value, part: &str| {
            let error = check_schema(&schema).expect_err(part).to_string();
            assert!(error.contains(part), "{error}");
        };
        let map = |n: usize| (0..n).map(|i| (format!("p{i}"), json!({}))).collect::<Value>();
        let list = |n: usize| (0..n).map(|i| json!(format!("p{i}"))).collect::<Value>();
        check(json!({"properties": map(1001)}), "1001 members in one place; at most 1000");
        check(json!({"required": list(1001)}), "1001 members");
        check(json!({"enum": [{"enum": map(1001)}]}), "1001 members");
        check(json!({"patternProperties": map(17)}), "17 patterns of properties");
        check(
            json!({"properties": {"a": {"pattern": "a".repeat(3000)}, "b": {"pattern": "b".repeat(3000)}}}),
            "bytes of patterns",
        );
        let patterns: Vec<Value> = (0..9).map(|i| json!({"pattern": format!("a{i}")})).collect();
        check(json!({"allOf": patterns}), "9 patterns beside schemas that are combined; at most 8");
        check(json!({"pattern": "b", "anyOf": patterns}), "10 patterns");
        check_schema(&json!({"anyOf": patterns})).unwrap();
        check(json!({"pattern": "(".repeat(100)}), "levels of nesting; at most 64");
        check((0..100).fold(json!({}), |inner, _| json!({"items": inner})), "levels of nesting; at most 64");
        check(json!({"description": "x".repeat(SCHEMA_BYTES_MAX)}), "bytes; at most 131072");
        check(json!({"allOf": [{"multipleOf": 9973}, {"multipleOf": 9967}]}), "multipleOf");
        check_schema(&json!({"properties": map(1000), "enum": list(5000), "multipleOf": 0.01})).unwrap();
    }
}
