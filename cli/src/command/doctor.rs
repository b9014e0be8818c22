//! Whether all is well here and, on a head, with its workers; and what to do where it is not.

mod devices;
pub mod machine;
mod workers;

use std::net::SocketAddr;
use std::process::ExitCode;

use anstyle::{AnsiColor, Style};
use anyhow::Result;
use pp_engine::cluster::health::{Finding, Severity};
use serde::Serialize;

use crate::args::DoctorArgs;
use crate::command::worker;
use crate::errors::Exit;
use crate::output::progress::Steps;
use crate::output::{Canvas, Out, Report, printable};

/// Looks and tells.
pub fn run(args: &DoctorArgs) -> Result<ExitCode> {
    let out = Out::new(args.output.json, false);
    let listen: SocketAddr = worker::listen(&args.listen)?;
    let mut steps = Steps::new(&out, "doctor", "checks");
    let total = if args.cluster { 3 } else { 2 };
    let mut findings = here(machine::all(listen));
    steps.update(1, total);
    findings.splice(0..0, here(devices::all(!args.no_selftest)));
    steps.update(2, total);
    if args.cluster {
        findings.extend(workers::all(!args.no_bandwidth));
    }
    steps.finish();
    let report = DoctorReport::new(findings);
    out.result(&report)?;
    Ok(match report.worst {
        Severity::Error => ExitCode::from(Exit::Failure as u8),
        Severity::Warning => ExitCode::from(Exit::Warnings as u8),
        Severity::Note | Severity::Ok => ExitCode::SUCCESS,
    })
}

fn here(findings: Vec<Finding>) -> Vec<Row> {
    findings.into_iter().map(|finding| Row { host: None, finding }).collect()
}

/// A finding, and where.
#[derive(Debug, Serialize)]
struct Row {
    /// The worker's name; null: this machine.
    host: Option<String>,
    #[serde(flatten)]
    finding: Finding,
}

#[derive(Debug, Serialize)]
struct DoctorReport {
    /// The worst of all.
    worst: Severity,
    errors: usize,
    warnings: usize,
    notes: usize,
    findings: Vec<Row>,
}

impl DoctorReport {
    fn new(findings: Vec<Row>) -> DoctorReport {
        let count = |severity| findings.iter().filter(|row| row.finding.severity == severity).count();
        DoctorReport {
            worst: findings.iter().map(|row| row.finding.severity).max().unwrap_or(Severity::Ok),
            errors: count(Severity::Error),
            warnings: count(Severity::Warning),
            notes: count(Severity::Note),
            findings,
        }
    }

    fn drawn(&self, colours: bool) -> String {
        let width = |of: fn(&Row) -> usize| self.findings.iter().map(of).max().unwrap_or(0);
        let (hosts, subjects) =
            (width(|row| row.place().chars().count()), width(|row| row.finding.subject.chars().count()));
        let line = |row: &Row| {
            let Finding { severity, subject, found, advice } = &row.finding;
            let style = if colours { style(*severity) } else { Style::new() };
            let mut line = format!(
                "{style}{:7}{style:#}  {:hosts$}  {:subjects$}  {}",
                word(*severity),
                row.place(),
                printable(subject),
                printable(found)
            );
            if let Some(advice) = advice {
                line.push_str(&format!("\n{:7}  {:hosts$}  {:subjects$}  → {}", "", "", "", printable(advice)));
            }
            line
        };
        let lines: Vec<String> = self.findings.iter().map(line).collect();
        let plural = |count: usize, one: &str| format!("{count} {one}{}", if count == 1 { "" } else { "s" });
        format!(
            "{}\n\n{}, {}, {}",
            lines.join("\n"),
            plural(self.errors, "error"),
            plural(self.warnings, "warning"),
            plural(self.notes, "note")
        )
    }
}

impl Row {
    fn place(&self) -> &str {
        self.host.as_deref().unwrap_or("here")
    }
}

fn word(severity: Severity) -> &'static str {
    match severity {
        Severity::Ok => "ok",
        Severity::Note => "note",
        Severity::Warning => "warning",
        Severity::Error => "error",
    }
}

fn style(severity: Severity) -> Style {
    let colour = match severity {
        Severity::Ok => AnsiColor::Green,
        Severity::Note => AnsiColor::Cyan,
        Severity::Warning => AnsiColor::Yellow,
        Severity::Error => AnsiColor::Red,
    };
    Style::new().fg_color(Some(colour.into()))
}

impl Report for DoctorReport {
    fn text(&self) -> String {
        self.drawn(Canvas::stdout().colours)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_worst_decides_and_advice_stands_below() {
        let rows = vec![
            Row { host: None, finding: Finding::ok("ports", "UDP 7711 is free") },
            Row {
                host: Some("rig2".to_owned()),
                finding: Finding::new(Severity::Warning, "disk", "12 MB are free\u{1b}", "make room"),
            },
        ];
        let report = DoctorReport::new(rows);
        assert_eq!((report.worst, report.errors, report.warnings, report.notes), (Severity::Warning, 0, 1, 0));
        let text = report.drawn(false);
        let wanted = "ok       here  ports  UDP 7711 is free\n\
                      warning  rig2  disk   12 MB are free\u{fffd}\n                      → make room\n\n\
                      0 errors, 1 warning, 0 notes";
        assert_eq!(text, wanted);
        assert!(report.drawn(true).contains("\u{1b}["));
        assert_eq!(DoctorReport::new(Vec::new()).worst, Severity::Ok);
    }
}
