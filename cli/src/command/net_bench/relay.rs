//! A network that delays and loses: two TUN devices in two namespaces, and threads of this process that carry IP packets
//! from one to the other. What crosses it is the same for TCP and for QUIC.

use std::fs::{File, OpenOptions};
use std::io::{ErrorKind, Read, Write};
use std::os::fd::AsFd;
use std::os::unix::fs::OpenOptionsExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use pp_engine::random::Random;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::ioctl::{Updater, ioctl};
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};

/// Packets on their way at once, each way: 15 MB. More are lost, as in a router whose buffer is full.
const QUEUE: usize = 10_000;
/// Largest packet that is carried: an Ethernet frame's, with room.
const PACKET_BYTES: usize = 2048;
/// How often a thread that carries looks whether it should stop.
const LOOK: Timespec = Timespec { tv_sec: 0, tv_nsec: 50_000_000 };
/// `TUNSETIFF` of linux/if_tun.h.
const TUNSETIFF: rustix::ioctl::Opcode = 0x4004_54ca;
/// `IFF_TUN | IFF_NO_PI`: packets of IP, without anything before them.
const IFF_TUN_NO_PI: u16 = 0x1001;
/// `IFNAMSIZ`, with the zero at the end.
const NAME_BYTES: usize = 16;

/// What becomes of packets.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Weather {
    /// Added each way.
    pub(super) delay: Duration,
    /// The share that is lost.
    pub(super) loss: f64,
    /// Which ones follows from this.
    pub(super) seed: u64,
}

/// `struct ifreq` of linux/if.h.
#[repr(C)]
struct Request {
    name: [u8; NAME_BYTES],
    flags: u16,
    rest: [u8; 22],
}

/// Carries until it is dropped.
pub(super) struct Relay {
    stop: Arc<AtomicBool>,
    threads: Vec<JoinHandle<()>>,
}

impl Relay {
    /// Between two network namespaces; the devices in them are called as they are.
    ///
    /// # Errors
    /// In words.
    pub(super) fn between(namespaces: &[String; 2], weather: Weather) -> Result<Relay, String> {
        let names = namespaces.clone();
        // A thread that changes its namespace is good for nothing else.
        let open = move || -> Result<[File; 2], String> { Ok([device(&names[0])?, device(&names[1])?]) };
        let opened = std::thread::spawn(open).join().map_err(|_| "a thread panicked".to_owned())?;
        let [a, b] = opened?;
        let mut relay = Relay { stop: Arc::default(), threads: Vec::new() };
        relay.carry(&a, &b, weather, 0)?;
        relay.carry(&b, &a, weather, 1)?;
        Ok(relay)
    }

    /// One way.
    fn carry(&mut self, from: &File, to: &File, weather: Weather, way: u64) -> Result<(), String> {
        let clone = |file: &File| file.try_clone().map_err(|error| error.to_string());
        let (from, mut to) = (clone(from)?, clone(to)?);
        let (tell, told) = sync_channel(QUEUE);
        let (stop, loss) = (self.stop.clone(), Loss::new(weather.loss, weather.seed ^ way));
        self.threads.push(std::thread::spawn(move || take(from, &stop, loss, weather.delay, &tell)));
        self.threads.push(std::thread::spawn(move || hand_on(&told, &mut to)));
        Ok(())
    }
}

impl Drop for Relay {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}

/// Makes the TUN device of a namespace, called as the namespace is; this thread is in it then.
fn device(namespace: &str) -> Result<File, String> {
    let path = format!("/var/run/netns/{namespace}");
    let there = File::open(&path).map_err(|error| format!("{path}: {error}"))?;
    move_into_link_name_space(there.as_fd(), Some(LinkNameSpaceType::Network))
        .map_err(|error| format!("cannot enter {path}: {error}"))?;
    let nonblocking = rustix::fs::OFlags::NONBLOCK.bits() as i32;
    let tun = OpenOptions::new().read(true).write(true).custom_flags(nonblocking).open("/dev/net/tun");
    let tun = tun.map_err(|error| format!("/dev/net/tun: {error}"))?;
    let mut request = Request { name: [0; NAME_BYTES], flags: IFF_TUN_NO_PI, rest: [0; 22] };
    let bytes = namespace.as_bytes();
    if bytes.len() >= NAME_BYTES {
        return Err(format!("{namespace} is too long for the name of a device"));
    }
    request.name[..bytes.len()].copy_from_slice(bytes);
    // SAFETY: TUNSETIFF takes a `struct ifreq`, whose layout `Request` has, and writes nothing beyond it.
    let made = unsafe { ioctl(&tun, Updater::<TUNSETIFF, Request>::new(&mut request)) };
    made.map_err(|error| format!("cannot make a TUN device: {error}"))?;
    Ok(tun)
}

/// When a packet is due, and the packet.
type Due = (Instant, Vec<u8>);

fn take(mut from: File, stop: &AtomicBool, mut loss: Loss, delay: Duration, tell: &SyncSender<Due>) {
    let mut packet = [0; PACKET_BYTES];
    while !stop.load(Ordering::Relaxed) {
        match from.read(&mut packet) {
            Ok(count) if !loss.strikes() => {
                // Where the queue is full it is lost, too.
                let _ = tell.try_send((Instant::now() + delay, packet[..count].to_vec()));
            }
            Ok(_) => {}
            Err(error) if error.kind() == ErrorKind::WouldBlock => {
                let _ = poll(&mut [PollFd::new(&from, PollFlags::IN)], Some(&LOOK));
            }
            // The device is not up yet, or not any more.
            Err(_) => std::thread::sleep(Duration::from_millis(1)),
        }
    }
}

fn hand_on(told: &Receiver<Due>, to: &mut File) {
    for (due, packet) in told {
        let left = due.saturating_duration_since(Instant::now());
        if !left.is_zero() {
            std::thread::sleep(left);
        }
        // What the other end does not take is lost.
        let _ = to.write(&packet);
    }
}

/// Which packets are lost.
struct Loss {
    share: f64,
    random: Random,
}

impl Loss {
    fn new(share: f64, seed: u64) -> Loss {
        Loss { share, random: Random::new(seed) }
    }

    fn strikes(&mut self) -> bool {
        self.random.unit() < self.share
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn as_many_are_lost_as_was_asked_for_and_the_same_ones_each_time() {
        let lost = |share, seed| -> Vec<bool> {
            let mut loss = Loss::new(share, seed);
            (0..100_000).map(|_| loss.strikes()).collect()
        };
        let count = |lost: &[bool]| lost.iter().filter(|lost| **lost).count();
        assert_eq!(count(&lost(0.0, 1)), 0);
        assert_eq!(count(&lost(1.0, 1)), 100_000);
        // Five standard deviations of a binomial distribution.
        for (share, least, most) in [(0.001, 50, 150), (0.01, 843, 1157), (0.5, 49_210, 50_790)] {
            let found = count(&lost(share, 7));
            assert!((least..=most).contains(&found), "{share}: {found}");
        }
        assert_eq!(lost(0.01, 3), lost(0.01, 3));
        assert_ne!(lost(0.01, 3), lost(0.01, 4));
    }
}
