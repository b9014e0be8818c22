//! Workers that measure their devices for a head.

use std::sync::atomic::AtomicBool;
use std::time::Duration;

use pp_engine::backend::paced::Pace;
use pp_engine::calibrate::{Shape, machine};
use pp_engine::pipeline::Device;
use pp_shaders::{Act, KvType, Profile};

use super::local::{Cluster, Place};
use crate::support::{checkpoint, exact};

fn slow() -> Device {
    let pace = Pace { layer_alpha: Duration::from_millis(1), head_alpha: Duration::from_millis(5), ..Pace::default() };
    Device::Paced { pace, profile: Profile::CARD, hold: Default::default(), brake: Default::default() }
}

#[test]
fn a_worker_measures_its_device_for_a_shape_and_refuses_what_makes_no_sense() {
    let checkpoint = checkpoint("tiny/llama-33");
    let cluster = Cluster::new(&checkpoint, vec![vec![slow()]]);
    let worker = cluster.lease(0);
    assert_eq!(worker.welcome().machine, machine(), "threads of this process are on this machine");
    let (shape, _) = Shape::of(&checkpoint, Act::F32, KvType::F32);
    let shape = Shape { layers: 6, ..shape };
    let go_on = AtomicBool::new(false);
    let found = worker.calibrate("paced", &shape, &go_on).unwrap();
    // How well it measures is looked at elsewhere, where it may be repeated.
    assert!(found.is_of(&shape) && found.kinds[0].seconds[0] > 5e-4 && found.last.seconds[0] > 3e-3, "{found:?}");
    let refused = |device: &str, shape: &Shape, wanted: &str| {
        let error = worker.calibrate(device, shape, &go_on).unwrap_err().to_string();
        assert!(error.contains("worker w0 refused") && error.contains(wanted), "{error}");
    };
    refused("a card", &shape, "no such device");
    refused("paced", &Shape { arch: "mamba".into(), ..shape.clone() }, "`mamba` is not supported");
    refused("paced", &Shape { kinds: Vec::new(), ..shape.clone() }, "0 kinds of layers");
    // It answers other questions still.
    assert!(worker.bandwidth(1).unwrap() > 0.0);
}

#[test]
fn a_worker_that_runs_stages_does_not_measure() {
    let checkpoint = checkpoint("tiny/llama-33");
    let cluster = Cluster::new(&checkpoint, vec![vec![slow()]]);
    let pipeline = cluster.pipeline(&checkpoint, &[33], exact(64), &[Place::There(0)]).unwrap();
    let (shape, _) = Shape::of(&checkpoint, Act::F32, KvType::F32);
    let error = cluster.look(0).calibrate("paced", &shape, &AtomicBool::new(false)).unwrap_err();
    assert!(error.to_string().contains("not measured while test has it"), "{error}");
    drop(pipeline);
}
