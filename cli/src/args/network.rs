//! What is typed about the state of machines and of the network between them.

use std::net::SocketAddr;
use std::path::PathBuf;

use clap::{Args, ValueEnum};

use super::OutputArgs;

/// Largest frame that is measured with.
const FRAME_BYTES_MAX: usize = pp_engine::cluster::measure::PAYLOAD_BYTES_MAX;

/// `net-bench`
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  pp-run net-bench                                     everything; two to five minutes
  pp-run net-bench --networks loopback --sizes 8K,64K --seconds 2
  pp-run net-bench --networks relay --delays 10 --losses 0,0.1,1
  pp-run net-bench --worker rig2                       the way to a worker of this head's cluster

Two processes send each other the frames that stages do: through memory, over QUIC as a pipeline has it, over plain TCP, \
and over TCP with TLS 1.3 and the same certificates. The networks `veth` (a virtual cable between two network namespaces, \
MTU 1500) and `relay` (the same with delay and loss) need root and `ip`; else their rows say why they were not measured.")]
pub struct NetBenchArgs {
    /// Measure the way to this worker instead
    #[arg(long, value_name = "NAME", conflicts_with_all = ["networks", "delays", "losses", "seed"])]
    pub worker: Option<String>,
    /// Networks, comma-separated
    #[arg(long, value_enum, value_name = "NAME,…", value_delimiter = ',', default_value = "loopback,veth,relay")]
    pub networks: Vec<NetworkArg>,
    /// Bytes of the frames, comma-separated; K (KiB) and M (MiB) are 1024 and 1024², KB and MB 1000 and 1000² [default: 64,8K,64K,1M,32M; relay: 8K,64K,1M]
    #[arg(long, value_name = "BYTES,…", value_delimiter = ',', value_parser = frame_bytes)]
    pub sizes: Vec<usize>,
    /// Most round trips of a size
    #[arg(long, value_name = "N", default_value_t = 2000)]
    pub reps: usize,
    /// How long round trips of a size are made, and frames sent one way
    #[arg(long, value_name = "SECONDS", default_value_t = 0.5, value_parser = seconds)]
    pub seconds: f64,
    /// Give up a size, and larger ones, that take longer
    #[arg(long, value_name = "SECONDS", default_value_t = 30.0, value_parser = seconds)]
    pub patience: f64,
    /// Delays that the relay adds each way, in milliseconds, comma-separated
    #[arg(long, value_name = "MS,…", value_delimiter = ',', default_value = "0,10,50", value_parser = clap::value_parser!(u32).range(0..=10_000))]
    pub delays: Vec<u32>,
    /// Packets of a hundred that the relay loses, comma-separated
    #[arg(long, value_name = "PERCENT,…", value_delimiter = ',', default_value = "0,0.1,1", value_parser = percent)]
    pub losses: Vec<f64>,
    /// Start of the random numbers by which packets are lost
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub seed: u64,
    #[command(flatten)]
    pub output: OutputArgs,
}

/// `doctor`
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  pp-run doctor                          this machine
  pp-run doctor --cluster                and every worker of this head's cluster
  pp-run doctor --json | jq -r '.findings[] | select(.severity != \"ok\") | .advice'

Ends with 0 when all is well or only worth a note, with 6 when there are warnings, with 1 when there are errors.")]
pub struct DoctorArgs {
    /// Look at the workers of this head's cluster as well
    #[arg(long)]
    pub cluster: bool,
    /// Where a worker would listen (UDP); without a port it is 7711
    #[arg(long, value_name = "ADDR[:PORT]", default_value = "0.0.0.0")]
    pub listen: String,
    /// Skip the self-test of the kernels on each device
    #[arg(long)]
    pub no_selftest: bool,
    /// With --cluster: do not measure the bandwidth (a few MiB to every worker and back)
    #[arg(long)]
    pub no_bandwidth: bool,
    #[command(flatten)]
    pub output: OutputArgs,
}

/// What lies between the two ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum NetworkArg {
    /// The loopback device
    Loopback,
    /// A pair of virtual Ethernet devices between two network namespaces, MTU 1500
    Veth,
    /// Two TUN devices, MTU 1500, and a relay between them that delays and loses
    Relay,
}

/// How frames cross.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum TransportArg {
    /// A channel between two threads
    Local,
    /// QUIC, as between stages
    Quic,
    /// TCP
    Tcp,
    /// TCP with TLS 1.3
    Tls,
}

/// `net-bench-end`, one end of a measurement: what `net-bench` starts
#[derive(Debug, Args)]
pub struct NetBenchEndArgs {
    /// Folder of this end's identity
    #[arg(long, value_name = "FOLDER")]
    pub folder: PathBuf,
    /// Serve at this address, until stdin ends
    #[arg(long, value_name = "ADDR:PORT", conflicts_with = "to", required_unless_present = "to")]
    pub listen: Option<SocketAddr>,
    /// Measure to the end that serves at this address
    #[arg(long, value_name = "ADDR:PORT")]
    pub to: Option<SocketAddr>,
    /// How
    #[arg(long, value_enum, value_name = "NAME")]
    pub transport: TransportArg,
    /// Bytes of the frames
    #[arg(long, value_name = "BYTES,…", value_delimiter = ',', value_parser = frame_bytes, required = true)]
    pub sizes: Vec<usize>,
    /// Most round trips of a size
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub reps: usize,
    /// How long each measurement takes
    #[arg(long, value_name = "SECONDS", default_value_t = 0.0, value_parser = seconds)]
    pub seconds: f64,
}

/// What may stand behind a number of bytes, in small letters.
const UNITS: [(&str, usize); 8] = [
    ("", 1),
    ("b", 1),
    ("k", 1 << 10),
    ("kib", 1 << 10),
    ("kb", 1000),
    ("m", 1 << 20),
    ("mib", 1 << 20),
    ("mb", 1_000_000),
];

fn frame_bytes(text: &str) -> Result<usize, String> {
    let wanted = || format!("expected 1 to {FRAME_BYTES_MAX} bytes, such as 64, 64B, 8K, 8KiB, 8KB or 1M");
    let digits = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let typed = text[digits.len()..].to_ascii_lowercase();
    let unit = UNITS.iter().find(|(name, _)| *name == typed).map(|(_, bytes)| *bytes);
    let bytes = digits.parse::<usize>().ok().zip(unit).and_then(|(number, unit)| number.checked_mul(unit));
    bytes.filter(|bytes| (1..=FRAME_BYTES_MAX).contains(bytes)).ok_or_else(wanted)
}

fn seconds(text: &str) -> Result<f64, String> {
    let in_range = |seconds: &f64| (0.0..=3600.0).contains(seconds);
    text.parse().ok().filter(in_range).ok_or_else(|| "expected 0 to 3600 seconds".to_owned())
}

fn percent(text: &str) -> Result<f64, String> {
    let in_range = |percent: &f64| (0.0..=50.0).contains(percent);
    text.parse().ok().filter(in_range).ok_or_else(|| "expected 0 to 50 of a hundred".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_have_units_and_limits() {
        for (text, bytes) in [("64", 64), ("8K", 8 << 10), ("8k", 8 << 10), ("32M", 32 << 20), ("1", 1)] {
            assert_eq!(frame_bytes(text), Ok(bytes));
        }
        for (text, bytes) in [("64B", 64), ("8KiB", 8 << 10), ("8kb", 8000), ("2MiB", 2 << 20), ("32MB", 32_000_000)] {
            assert_eq!(frame_bytes(text), Ok(bytes));
        }
        for text in [
            "",
            "0",
            "K",
            "8KK",
            "8MK",
            "-1",
            "33M",
            "1.5M",
            "8G",
            "8KiBB",
            "KiB",
            "8 K",
            "8Ki",
            "99999999999999999999",
            "99999999999999M",
        ] {
            assert!(frame_bytes(text).unwrap_err().contains("8K"), "{text}");
        }
    }

    #[test]
    fn times_and_shares_have_limits() {
        assert_eq!((seconds("0.5"), percent("0.1")), (Ok(0.5), Ok(0.1)));
        for text in ["-1", "x", "NaN", "inf", "5000"] {
            assert!(seconds(text).is_err() && percent(text).is_err(), "{text}");
        }
    }
}
