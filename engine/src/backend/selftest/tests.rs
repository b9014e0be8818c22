use std::collections::HashSet;

use pp_shaders::Profile;
use pp_shaders::registry::KERNELS;

use super::*;
use crate::backend::{Counts, DeviceLimits, Done, OpTime, ProgramId, Ticket};
use crate::program::Shape;

/// The twins, but one bit of what is read back after run `wrong` is another.
struct Faulty {
    inner: Reference,
    runs: usize,
    wrong: usize,
}

impl Backend for Faulty {
    fn name(&self) -> &str {
        "faulty"
    }
    fn profile(&self) -> &Profile {
        self.inner.profile()
    }
    fn limits(&self) -> DeviceLimits {
        self.inner.limits()
    }
    fn create(&mut self, label: &str, bytes: usize) -> Result<BufferId, DeviceError> {
        self.inner.create(label, bytes)
    }
    fn write(&mut self, buffer: BufferId, offset: usize, data: &[u8]) -> Result<(), DeviceError> {
        self.inner.write(buffer, offset, data)
    }
    fn clear(&mut self, buffers: &[BufferId]) -> Result<(), DeviceError> {
        self.inner.clear(buffers)
    }
    fn prepare(&mut self, program: Program) -> Result<ProgramId, DeviceError> {
        self.inner.prepare(program)
    }
    fn submit(&mut self, run: &Run<'_>) -> Result<Ticket, DeviceError> {
        self.inner.submit(run)
    }
    fn collect(&mut self, ticket: Ticket) -> Result<Done, DeviceError> {
        let mut done = self.inner.collect(ticket)?;
        if self.runs == self.wrong {
            let most = done.reads[0].len() - 1;
            done.reads[0][most] ^= 0x40;
        }
        self.runs += 1;
        Ok(done)
    }
    fn time(&mut self, programs: &[(ProgramId, Shape)]) -> Result<Vec<OpTime>, DeviceError> {
        self.inner.time(programs)
    }
    fn program(&self, id: ProgramId) -> &Program {
        self.inner.program(id)
    }
    fn allocated_bytes(&self) -> u64 {
        self.inner.allocated_bytes()
    }
    fn counts(&self) -> Counts {
        self.inner.counts()
    }
}

fn faulty(profile: Profile, wrong: usize) -> Faulty {
    Faulty { inner: Reference::new(profile, 1 << 30), runs: 0, wrong }
}

#[test]
fn a_healthy_device_passes_and_every_kernel_is_looked_at() {
    let mut kernels = HashSet::new();
    for profile in Profile::ALL {
        let report = run(&mut faulty(profile, usize::MAX)).unwrap();
        let cases = cases::all(&profile);
        assert_eq!(report.checked, cases.len());
        kernels.extend(cases.iter().map(|case| case.variant.kernel));
    }
    assert_eq!(kernels.len(), KERNELS.len());
}

#[test]
fn one_wrong_bit_in_any_kernel_is_found() {
    let profile = Profile::SOFTWARE;
    for (wrong, case) in cases::all(&profile).iter().enumerate() {
        let error = run(&mut faulty(profile, wrong)).expect_err(&case.variant.label());
        let SelfTestError::Mismatch { kernel, device, expected, found, .. } = &error else { panic!("{error}") };
        assert_eq!((kernel, device.as_str()), (&case.variant.label(), "faulty"));
        assert!(expected != found, "{error}");
    }
}

#[test]
fn differences_are_told_where_they_are() {
    let float = |v: f32| v.to_bits();
    let differ = |compare: Compare, e: &[u32], f: &[u32]| compare.differ(e, f).map(|d| d.index);
    assert_eq!(differ(Compare::Relative(1e-4), &[float(1.0), float(1.0)], &[float(1.0), float(1.001)]), Some(1));
    assert_eq!(differ(Compare::Relative(1e-2), &[float(1.0)], &[float(1.001)]), None);
    assert_eq!(differ(Compare::Relative(1e-2), &[float(1.0)], &[float(f32::NAN)]), Some(0));
    assert_eq!(differ(Compare::Relative(1e-2), &[float(1.0)], &[]), Some(0));
    assert_eq!(differ(Compare::Equal, &[1, 2], &[1, 3]), Some(1));
    assert_eq!(differ(Compare::Bytes, &[0x0102_0304], &[0x0102_0405]), None);
    assert_eq!(differ(Compare::Bytes, &[0x0102_0304], &[0x0104_0304]), Some(2));
    assert_eq!(differ(Compare::Halves, &[0x3c00_3c00], &[0x3c00_3c01]), None);
    assert_eq!(differ(Compare::Halves, &[0x3c00_3c00], &[0x3c09_3c00]), Some(1));
}
