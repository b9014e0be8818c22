//! Who does a node's work: reading and writing its socket, and running its tasks.
//!
//! The node's runtime is driven by one thread at a time. A thread that waits at a link for data does it itself, so that
//! a frame takes no way through another thread; and a thread that sends does it for a moment, when nobody else does. The
//! node's I/O thread does it whenever no other has done it for [`PAUSE`], or when several threads wait: signs of life
//! never depend on what stages do. Payloads that are large are left to it, too: the thread that has or wants them can do
//! something else meanwhile. It leaves the work when a frame or a credit has come for the only thread that waits,
//! which may soon wait or send again.

use std::pin::Pin;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::task::{Poll, Waker};
use std::time::{Duration, Instant};

use tokio::runtime::{Handle, Runtime};
use tokio::task::JoinHandle;

/// How long the work may lie before the I/O thread takes it: less than what a neighbour would take for a queue on the
/// way (`congestion`).
const PAUSE: Duration = Duration::from_millis(1);

/// The right to do a node's work, which one thread has at a time.
pub(super) struct Drive {
    /// A lock that is held for moments, and the last one to be taken.
    work: Mutex<Work>,
    /// The I/O thread is wanted.
    called: Condvar,
}

struct Work {
    /// Here as long as nobody does the work.
    runtime: Option<Runtime>,
    /// When it was put here, or taken.
    since: Instant,
    /// How long it may lie here.
    pause: Duration,
    /// Threads that wait for data while another does the work.
    waiting: usize,
    /// The I/O thread looks by itself before the pause is over.
    is_watched: bool,
    /// Calls the I/O thread off while it does the work.
    keeper: Option<Waker>,
}

/// A thread's turn, which ends when this is dropped.
pub(super) struct Shift<'a> {
    drive: &'a Drive,
    /// Until it is dropped.
    runtime: Option<Runtime>,
}

impl Drive {
    pub(super) fn new(runtime: Runtime) -> Drive {
        let work = Work {
            runtime: Some(runtime),
            since: Instant::now(),
            pause: Duration::ZERO,
            waiting: 0,
            is_watched: true,
            keeper: None,
        };
        Drive { work: Mutex::new(work), called: Condvar::new() }
    }

    fn lock(&self) -> MutexGuard<'_, Work> {
        self.work.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A turn for a thread that will wait for data, if it `may` and nobody else does the work or waits. Without one the
    /// thread counts as waiting until somebody says that it does not ([`Drive::served`]).
    pub(super) fn shift_or_wait(&self, may: bool) -> Option<Shift<'_>> {
        let mut work = self.lock();
        if may
            && work.waiting == 0
            && let Some(shift) = self.take(&mut work)
        {
            return Some(shift);
        }
        work.waiting += 1;
        if work.runtime.is_some() {
            self.called.notify_one();
        }
        None
    }

    /// There is much to do: the I/O thread takes the work at once, if nobody does it.
    pub(super) fn call(&self) {
        let mut work = self.lock();
        work.pause = Duration::ZERO;
        if work.runtime.is_some() {
            self.called.notify_one();
        }
    }

    /// A turn for a thread that does not wait, if nobody does the work.
    pub(super) fn shift(&self) -> Option<Shift<'_>> {
        self.take(&mut self.lock())
    }

    fn take(&self, work: &mut Work) -> Option<Shift<'_>> {
        // A thread of another runtime, which may not drive two.
        if work.runtime.is_none() || Handle::try_current().is_ok() {
            return None;
        }
        let runtime = work.runtime.take();
        work.since = Instant::now();
        Some(Shift { drive: self, runtime })
    }

    /// So many threads do not wait any more; `is_there` if what they waited for is.
    pub(super) fn served(&self, threads: usize, is_there: bool) {
        let mut work = self.lock();
        work.waiting -= threads;
        if !is_there || work.waiting > 0 {
            return;
        }
        if let Some(keeper) = work.keeper.take() {
            drop(work);
            keeper.wake();
        }
    }

    /// The life of the I/O thread, until `task` is done: nobody does the work after that.
    pub(super) fn keep(&self, mut task: JoinHandle<()>) {
        loop {
            let mut shift = self.wanted();
            let mut is_called = false;
            let is_done = shift.run(std::future::poll_fn(|cx| {
                if Pin::new(&mut task).poll(cx).is_ready() {
                    return Poll::Ready(true);
                }
                let mut work = self.lock();
                // Somebody has taken it to wake this thread.
                if std::mem::replace(&mut is_called, true) && work.keeper.is_none() {
                    return Poll::Ready(false);
                }
                work.keeper = Some(cx.waker().clone());
                Poll::Pending
            }));
            self.lock().keeper = None;
            if is_done {
                return shift.runtime.take().into_iter().for_each(end);
            }
        }
    }

    /// A turn for the I/O thread, as soon as one is due.
    fn wanted(&self) -> Shift<'_> {
        let mut work = self.lock();
        loop {
            let is_idle = work.runtime.is_some();
            let due = work.since + if is_idle { work.pause } else { PAUSE };
            let left = due.saturating_duration_since(Instant::now());
            if (left.is_zero() || work.waiting > 0)
                && let Some(shift) = self.take(&mut work)
            {
                work.is_watched = true;
                return shift;
            }
            // Who has done the work for long will call when it leaves it.
            work.is_watched = !left.is_zero();
            work = if left.is_zero() {
                self.called.wait(work).unwrap_or_else(PoisonError::into_inner)
            } else {
                self.called.wait_timeout(work, left).unwrap_or_else(PoisonError::into_inner).0
            };
        }
    }
}

impl Drop for Drive {
    fn drop(&mut self) {
        let work = self.work.get_mut().unwrap_or_else(PoisonError::into_inner);
        work.runtime.take().into_iter().for_each(end);
    }
}

/// Looking up a name may hang; it is not waited for.
fn end(runtime: Runtime) {
    runtime.shutdown_background();
}

impl Shift<'_> {
    /// Does the node's work until `future` is done.
    pub(super) fn run<T>(&mut self, future: impl Future<Output = T>) -> T {
        self.runtime.as_ref().expect("until it is dropped").block_on(future)
    }
}

impl Drop for Shift<'_> {
    fn drop(&mut self) {
        let Some(runtime) = self.runtime.take() else { return };
        let mut work = self.drive.lock();
        (work.runtime, work.since, work.pause) = (Some(runtime), Instant::now(), PAUSE);
        let is_called = !work.is_watched || work.waiting > 0;
        drop(work);
        if is_called {
            self.drive.called.notify_one();
        }
    }
}
