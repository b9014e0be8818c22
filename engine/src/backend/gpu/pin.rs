//! Puts each worker thread of Mesa's software driver on a core of its own.
//!
//! The driver hands a dispatch to one thread a core and waits for all of them. A dispatch of a decode step takes some
//! hundred microseconds: less than the scheduler waits before it moves a thread to an idle core, so that two workers
//! woken on one core stay there and take turns. Pinned, a decode step takes 30 ms where it took 33 to 50. Where the
//! driver was told to take fewer threads (`LP_NUM_THREADS`), the scheduler places them.

/// Pins the workers, once a process. To be called by the thread that has just opened the process's first device: the
/// driver starts its workers then, after those called `llvmpipe-…`, and they inherit that thread's name.
pub(super) fn pin_driver_threads() {
    static ONCE: std::sync::Once = std::sync::Once::new();
    ONCE.call_once(pin);
}

#[cfg(target_os = "linux")]
fn pin() {
    let name = |id: i32| std::fs::read_to_string(format!("/proc/self/task/{id}/comm")).unwrap_or_default();
    // SAFETY: the calls read and write a set of this frame, and change threads of this process only.
    let (own_id, cores) = unsafe {
        let mut set: libc::cpu_set_t = std::mem::zeroed();
        let known = libc::sched_getaffinity(0, size_of::<libc::cpu_set_t>(), &mut set) == 0;
        let cores: Vec<usize> =
            (0..libc::CPU_SETSIZE as usize).filter(|core| known && libc::CPU_ISSET(*core, &set)).collect();
        (libc::gettid(), cores)
    };
    let Ok(tasks) = std::fs::read_dir("/proc/self/task") else { return };
    let mut ids: Vec<i32> = tasks.filter_map(|task| task.ok()?.file_name().to_str()?.parse().ok()).collect();
    ids.sort_unstable();
    let Some(last_named) = ids.iter().rposition(|id| name(*id).starts_with("llvmpipe-")) else { return };
    let own_name = name(own_id);
    let workers: Vec<i32> =
        ids[last_named + 1..].iter().copied().filter(|id| *id != own_id && name(*id) == own_name).collect();
    // As many as there are cores, or it is not known which of them others want: processes with a thread each would all
    // take the first core.
    if cores.len() < 2 || workers.len() != cores.len() {
        return;
    }
    for (worker, core) in workers.into_iter().zip(cores) {
        // SAFETY: as above; a worker that has ended meanwhile is an error that changes nothing.
        unsafe {
            let mut set: libc::cpu_set_t = std::mem::zeroed();
            libc::CPU_SET(core, &mut set);
            libc::sched_setaffinity(worker, size_of::<libc::cpu_set_t>(), &set);
        }
    }
}

#[cfg(not(target_os = "linux"))]
fn pin() {}
