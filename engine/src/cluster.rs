//! Stages on other hosts. The head leases workers, tells each which stages of the pipeline are its, and hears how they
//! do; [`crate::pipeline`] runs such stages beside those of its own process.
//!
//! [`control`] is what they say to each other, [`worker`] the worker's side, [`remote`] the head's. [`health`] is what a
//! worker says of its host, [`measure`] how the way to it is measured. Activations do not pass here: they cross the links
//! between neighbours ([`pp_transport::quic`]). [`weights`] is how tensors cross links of their own, [`fetch`] how a
//! worker gets those of its stages, [`whole`] how a head gets a model whole.

pub mod clock;
pub mod control;
pub mod fetch;
pub mod health;
pub mod measure;
pub mod remote;
mod session;
pub mod weights;
pub mod whole;
pub mod worker;

/// Credits of a control link: messages that the other end has not taken yet.
const CONTROL_CREDITS: u64 = 256;

/// Bounds of the control links between heads and workers.
pub fn control_limits() -> pp_transport::LinkLimits {
    pp_transport::LinkLimits {
        credits: CONTROL_CREDITS,
        payload_bytes: control::MESSAGE_BYTES_MAX,
        silence: pp_transport::quic::tuning::SILENCE,
    }
}
