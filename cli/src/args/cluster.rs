//! What is typed on a worker, and on the head about its cluster.

use bytesize::ByteSize;
use clap::{Args, Subcommand};

use super::{OutputArgs, ProfileArg};

/// `worker`
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  pp-run worker                                   every card of this machine, on UDP port 7711
  pp-run worker --listen 192.0.2.12:7711 --name rig2
  pp-run worker --device 0,1 --json               two adapters; one line of JSON when it is ready
  pp-run worker --cache-size 200GB                room for tensors of models that it has no copy of

The first time it makes a key and prints what to run on the head within 10 minutes; after that it just serves. It \
ends with Ctrl-C or SIGTERM. Its firewall must let UDP in on the port; README.md has the rule, and a systemd unit.")]
pub struct WorkerArgs {
    /// Where to listen (UDP); without a port it is 7711
    #[arg(long, value_name = "ADDR[:PORT]", default_value = "0.0.0.0")]
    pub listen: String,
    /// Address to print for the head, where it is not the one that this machine would use to reach others
    #[arg(long, value_name = "ADDR[:PORT]")]
    pub advertise: Option<String>,
    /// Name to be enrolled with (default: the host name)
    #[arg(long, value_name = "NAME")]
    pub name: Option<String>,
    /// Adapters to give, by index, id or part of the name, comma-separated (default: every hardware adapter; a
    /// software one only when named or when there is nothing else). `reference` is the processor without a driver
    #[arg(long, value_name = "SEL[,SEL…]", value_delimiter = ',')]
    pub device: Vec<String>,
    /// Shapes of the kernels: for graphics cards or for software drivers; auto is by adapter
    #[arg(long, value_enum, default_value_t, value_name = "PROFILE")]
    pub profile: ProfileArg,
    /// Bytes that tensors from other machines may take in $XDG_CACHE_HOME/pp-run/tensors; what was used longest ago goes
    /// first. Only what a model's own file does not have is kept there. Units: MB, GB, TB or MiB, GiB, TiB
    #[arg(long, value_name = "SIZE", default_value = "50GB")]
    pub cache_size: ByteSize,
    #[command(flatten)]
    pub output: OutputArgs,
}

/// `cluster`
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  pp-run cluster init                                   once, on the head
  pp-run cluster add rig2 192.0.2.12:7711 --code CODE   as a new worker prints it
  pp-run cluster status
  pp-run cluster drain rig2                             it takes nothing new
  pp-run cluster rebalance --split 12,18                other layers for the stages that run
  pp-run cluster remove rig2                            its certificate is void")]
pub struct ClusterArgs {
    #[command(subcommand)]
    pub verb: ClusterVerb,
}

/// What can be done with a cluster.
#[derive(Debug, Subcommand)]
pub enum ClusterVerb {
    /// Begin a cluster: its authority, and this machine as its head
    Init(InitArgs),
    /// Enrol a worker that waits for it
    Add(AddArgs),
    /// Members, where they are, what they have and do, and how far away they are
    Status(StatusArgs),
    /// Take a worker out of the cluster, for good
    Remove(RemoveArgs),
    /// Let a worker end what it runs and take nothing new
    Drain(DrainArgs),
    /// Divide the layers of a pipeline that runs otherwise; answers go on
    Rebalance(RebalanceArgs),
}

/// `cluster init`
#[derive(Debug, Args)]
#[command(after_help = "Example:\n  pp-run cluster init && pp-run cluster status")]
pub struct InitArgs {
    /// Name of this head in the cluster
    #[arg(long, value_name = "NAME", default_value = "head")]
    pub name: String,
    #[command(flatten)]
    pub output: OutputArgs,
}

/// `cluster add`
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  pp-run cluster add rig2 192.0.2.12:7711 --code 6F2K-…   as the worker has printed it
  pp-run cluster add rig3 rig3.example.net                port 7711, code of PP_JOIN_CODE
  pp-run cluster add rig2 192.0.2.99                      a member that has moved")]
pub struct AddArgs {
    /// What to call the worker: a-z, 0-9 and -
    #[arg(value_name = "NAME")]
    pub name: String,
    /// Where it listens; without a port it is 7711
    #[arg(value_name = "ADDR[:PORT]")]
    pub address: String,
    /// The code that it has printed, or that was preset there
    #[arg(long, value_name = "CODE", env = "PP_JOIN_CODE", hide_env_values = true, allow_hyphen_values = true)]
    pub code: Option<String>,
    #[command(flatten)]
    pub output: OutputArgs,
}

/// `cluster status`
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  pp-run cluster status
  pp-run cluster status --json | jq -r '.members[] | select(.state != \"ready\") | .name'

Ends with 0 when every worker answers, else with 5.")]
pub struct StatusArgs {
    /// Do not measure the bandwidth (a few MiB to every worker and back)
    #[arg(long)]
    pub no_bandwidth: bool,
    #[command(flatten)]
    pub output: OutputArgs,
}

/// `cluster remove`
#[derive(Debug, Args)]
#[command(after_help = "Example:\n  pp-run cluster remove rig2")]
pub struct RemoveArgs {
    /// The worker
    #[arg(value_name = "NAME")]
    pub name: String,
    #[command(flatten)]
    pub output: OutputArgs,
}

/// `cluster drain`
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  pp-run cluster drain rig2\n  pp-run cluster drain rig2 --undo")]
pub struct DrainArgs {
    /// The worker
    #[arg(value_name = "NAME")]
    pub name: String,
    /// Let it take work again
    #[arg(long)]
    pub undo: bool,
    #[command(flatten)]
    pub output: OutputArgs,
}

/// `cluster rebalance`
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  pp-run cluster rebalance --split 12,18            of the one pipeline that runs
  pp-run cluster rebalance --split 12,18 rig2       of the one that has a stage on rig2

Each stage keeps the layers that it has; those that move are loaded where they go, and keys and
values up to the last of them computed again from the tokens. Answers pause meanwhile. It ends when
the pipeline runs again, or says why it does not.")]
pub struct RebalanceArgs {
    /// Layers of each stage, as many numbers as stages run
    #[arg(long, value_name = "A,B,…", value_delimiter = ',', required = true)]
    pub split: Vec<u32>,
    /// A worker of the pipeline, where several run
    #[arg(value_name = "NAME")]
    pub name: Option<String>,
    #[command(flatten)]
    pub output: OutputArgs,
}
