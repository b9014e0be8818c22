//! Workers whose devices only take time: everything between them is real.

use std::time::Duration;

use pp_engine::Profile;
use pp_engine::head::{Head, HeadOptions};
use pp_engine::layout::StageOptions;
use pp_engine::pipeline::Device;
use pp_engine::trace::Trace;
use pp_engine::trace::causes::{Cause, causes};

use super::local::{Cluster, Place};
use crate::paced::{best, decode_share};
use crate::support::{checkpoint, exact, tokenizer};

const SLOT: Duration = Duration::from_millis(40);

/// Clocks of hosts are known to fractions of a millisecond here; more would be a fault in how times are moved to ours.
fn nothing_arrives_before_it_was_sent(trace: &Trace) {
    for pair in trace.stages.windows(2) {
        for span in &pair[1].spans {
            let Some(before) = pair[0].spans.iter().find(|before| before.step == span.step) else { continue };
            assert!(span.arrived + 5_000_000 > before.sent, "step {}: {before:?} and {span:?}", span.step);
        }
    }
}

/// Four stages over QUIC reach 90 % of the ring's law, read from a trace that crosses hosts; and all of the time of
/// every stage is accounted for in it (T13).
#[test]
fn decode_over_quic_reaches_the_law() {
    let checkpoint = checkpoint("tiny/llama-33");
    let device = || Device::paced(SLOT, Duration::ZERO, Profile::CARD);
    let cluster = Cluster::new(&checkpoint, vec![vec![device()]; 3]);
    let places = [Place::Here(device()), Place::There(0), Place::There(1), Place::There(2)];
    for groups in [4, 6, 8] {
        let measure = || {
            let options = StageOptions { sequences: groups, kv_tokens: 192 * groups, ..exact(192) };
            let pipeline = cluster.pipeline(&checkpoint, &[9, 8, 8, 8], options, &places).unwrap();
            let options = HeadOptions { groups: Some(groups), ..HeadOptions::default() };
            let mut head = Head::new(pipeline, tokenizer(&checkpoint), options);
            let share = decode_share(&mut head, 4, groups, SLOT);
            let trace = head.trace();
            nothing_arrives_before_it_was_sent(&trace);
            for stage in causes(&trace) {
                let sum: u64 = Cause::ALL.iter().map(|cause| stage.total(*cause)).sum();
                assert_eq!(sum, stage.wall(), "T13");
                assert!(stage.share(Cause::Unattributed) < 0.01, "{stage:?}");
            }
            share
        };
        let share = best(measure, 0.9);
        assert!((0.9..1.05).contains(&share), "M = {groups}: {share:.3} of the law");
    }
}
