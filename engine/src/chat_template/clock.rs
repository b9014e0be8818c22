//! `strftime_now`: Python's `strftime` on a given second, in UTC and English.

const DAYS: [&str; 7] = ["Thursday", "Friday", "Saturday", "Sunday", "Monday", "Tuesday", "Wednesday"];
const MONTHS: [&str; 12] = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
];

/// Formats `unix`, in seconds since 1970. Codes it does not know stay as they are.
pub(super) fn strftime(format: &str, unix: u64) -> String {
    let (days, second) = (unix / 86_400, unix % 86_400);
    let (year, month, day) = date(days);
    let (hour, minute, second) = (second / 3600, second / 60 % 60, second % 60);
    let first = days - (day - 1) - (0..month).map(|month| month_days(year, month)).sum::<u64>();
    let (weekday, month_name) = (DAYS[(days % 7) as usize], MONTHS[month as usize]);
    let half = if hour % 12 == 0 { 12 } else { hour % 12 };
    let mut out = String::new();
    let mut letters = format.chars();
    while let Some(letter) = letters.next() {
        if letter != '%' {
            out.push(letter);
            continue;
        }
        let (unpadded, code) = match letters.next() {
            Some('-') => (true, letters.next()),
            code => (false, code),
        };
        let number = |n: u64, width: usize| {
            if unpadded { n.to_string() } else { format!("{n:0width$}") }
        };
        out.push_str(&match code {
            Some('Y') => year.to_string(),
            Some('y') => number(year % 100, 2),
            Some('m') => number(month + 1, 2),
            Some('d') => number(day, 2),
            Some('e') => {
                if unpadded {
                    day.to_string()
                } else {
                    format!("{day:2}")
                }
            }
            Some('j') => number(days - first + 1, 3),
            Some('H') => number(hour, 2),
            Some('I') => number(half, 2),
            Some('M') => number(minute, 2),
            Some('S') => number(second, 2),
            Some('p') => if hour < 12 { "AM" } else { "PM" }.to_owned(),
            Some('A') => weekday.to_owned(),
            Some('a') => weekday[..3].to_owned(),
            Some('B') => month_name.to_owned(),
            Some('b' | 'h') => month_name[..3].to_owned(),
            Some('F') => format!("{year}-{:02}-{day:02}", month + 1),
            Some('T') => format!("{hour:02}:{minute:02}:{second:02}"),
            Some('Z') => "UTC".to_owned(),
            Some('%') => "%".to_owned(),
            Some(other) => format!("%{}{other}", if unpadded { "-" } else { "" }),
            None => "%".to_owned(),
        });
    }
    out
}

/// Year, month from 0 and day from 1 of a day since 1970.
fn date(mut days: u64) -> (u64, u64, u64) {
    // 400 years have 146097 days; skipping them bounds the loop below.
    let mut year = 1970 + days / 146_097 * 400;
    days %= 146_097;
    while days >= year_days(year) {
        days -= year_days(year);
        year += 1;
    }
    let mut month = 0;
    while days >= month_days(year, month) {
        days -= month_days(year, month);
        month += 1;
    }
    (year, month, days + 1)
}

fn year_days(year: u64) -> u64 {
    if is_leap(year) { 366 } else { 365 }
}

fn month_days(year: u64, month: u64) -> u64 {
    match month {
        1 if is_leap(year) => 29,
        1 => 28,
        3 | 5 | 8 | 10 => 30,
        _ => 31,
    }
}

fn is_leap(year: u64) -> bool {
    year.is_multiple_of(4) && (!year.is_multiple_of(100) || year.is_multiple_of(400))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dates() {
        // `date -u -d @N +…` says the same.
        assert_eq!(strftime("%d %b %Y", 1_721_952_000), "26 Jul 2024");
        assert_eq!(
            strftime("%A %-d %B %Y, day %j, %I:%M:%S %p", 951_782_399),
            "Monday 28 February 2000, day 059, 11:59:59 PM"
        );
        assert_eq!(strftime("%F %T %a", 951_782_400), "2000-02-29 00:00:00 Tue");
        assert_eq!(strftime("%F %j", 4_102_444_799), "2099-12-31 365");
        assert_eq!(strftime("100%% %Q %", 0), "100% %Q %");
    }
}
