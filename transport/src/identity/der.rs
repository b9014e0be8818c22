//! When a certificate is valid: webpki checks it and does not say it.

use std::time::Duration;

use rustls_pki_types::UnixTime;
use time::{Date, Month, PrimitiveDateTime, Time};

const INTEGER: u8 = 0x02;
const UTC_TIME: u8 = 0x17;
const GENERALIZED_TIME: u8 = 0x18;
const SEQUENCE: u8 = 0x30;
/// The version of a certificate, `[0] EXPLICIT`.
const VERSION: u8 = 0xa0;

/// The first and the last second in which a certificate is valid.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Validity {
    pub(crate) not_before: UnixTime,
    pub(crate) not_after: UnixTime,
}

/// The validity of a certificate of version 3 (RFC 5280, section 4.1).
pub(crate) fn validity(certificate: &[u8]) -> Option<Validity> {
    let (certificate, _) = element(certificate, SEQUENCE)?;
    let (to_be_signed, _) = element(certificate, SEQUENCE)?;
    let mut rest = to_be_signed;
    for (tag, _what) in [(VERSION, "version"), (INTEGER, "serial"), (SEQUENCE, "algorithm"), (SEQUENCE, "issuer")] {
        rest = element(rest, tag)?.1;
    }
    let (validity, _) = element(rest, SEQUENCE)?;
    let (not_before, rest) = instant(validity)?;
    let (not_after, _) = instant(rest)?;
    Some(Validity { not_before, not_after })
}

/// The contents of the element with which `bytes` begin, and what follows it. Lengths up to 65535.
fn element(bytes: &[u8], tag: u8) -> Option<(&[u8], &[u8])> {
    let (&found, rest) = bytes.split_first()?;
    let (&first, rest) = rest.split_first()?;
    let (length, rest) = match (first, rest) {
        (0..=0x7f, _) => (usize::from(first), rest),
        (0x81, [a, rest @ ..]) => (usize::from(*a), rest),
        (0x82, [a, b, rest @ ..]) => (usize::from(u16::from_be_bytes([*a, *b])), rest),
        _ => return None,
    };
    (found == tag && length <= rest.len()).then(|| rest.split_at(length))
}

/// `YYMMDDHHMMSSZ` or `YYYYMMDDHHMMSSZ`, and what follows it.
fn instant(bytes: &[u8]) -> Option<(UnixTime, &[u8])> {
    let (digits, rest, year_digits) = match element(bytes, UTC_TIME) {
        Some((digits, rest)) => (digits, rest, 2),
        None => element(bytes, GENERALIZED_TIME).map(|(digits, rest)| (digits, rest, 4))?,
    };
    let digits = digits.strip_suffix(b"Z")?;
    if digits.len() != year_digits + 10 || !digits.iter().all(u8::is_ascii_digit) {
        return None;
    }
    let number = |digits: &[u8]| digits.iter().fold(0u16, |sum, digit| sum * 10 + u16::from(digit - b'0'));
    let (year, rest_of_it) = digits.split_at(year_digits);
    let year = match (year_digits, number(year)) {
        (2, year @ 0..50) => 2000 + year,
        (2, year) => 1900 + year,
        (_, year) => year,
    };
    let pair = |at: usize| number(&rest_of_it[2 * at..2 * at + 2]) as u8;
    let date = Date::from_calendar_date(i32::from(year), Month::try_from(pair(0)).ok()?, pair(1)).ok()?;
    let time = Time::from_hms(pair(2), pair(3), pair(4)).ok()?;
    let seconds = PrimitiveDateTime::new(date, time).assume_utc().unix_timestamp();
    Some((UnixTime::since_unix_epoch(Duration::from_secs(seconds.try_into().ok()?)), rest))
}
