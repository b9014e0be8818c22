//! A network between two endpoints: it delays, loses, goes dark, and gives the dialler another address.

use std::net::SocketAddr;
use std::sync::{Arc, Mutex, MutexGuard};
use std::thread::JoinHandle;
use std::time::Duration;

use tokio::net::UdpSocket;
use tokio::sync::Notify;

use super::LOOPBACK;

/// What becomes of datagrams.
pub(super) struct Weather {
    pub(super) delay: Duration,
    /// Of how many one is lost; none if zero.
    pub(super) loses_one_in: u64,
    pub(super) is_dark: bool,
    random: u64,
}

pub(super) struct Relay {
    pub(super) address: SocketAddr,
    air: Arc<Air>,
    thread: Option<JoinHandle<()>>,
}

struct Air {
    weather: Mutex<Weather>,
    rebind: Notify,
    stop: Notify,
}

impl Relay {
    /// From whoever comes to `to`.
    pub(super) fn start(to: SocketAddr) -> Relay {
        let weather = Weather { delay: Duration::ZERO, loses_one_in: 0, is_dark: false, random: 0x5eed };
        let air = Arc::new(Air { weather: Mutex::new(weather), rebind: Notify::new(), stop: Notify::new() });
        let front = std::net::UdpSocket::bind(LOOPBACK).unwrap();
        let address = front.local_addr().unwrap();
        front.set_nonblocking(true).unwrap();
        let carried = air.clone();
        let thread = std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            runtime.block_on(async {
                tokio::select! {
                    () = carry(carried.clone(), UdpSocket::from_std(front).unwrap(), to) => {}
                    () = carried.stop.notified() => {}
                }
            });
        });
        Relay { address, air, thread: Some(thread) }
    }

    pub(super) fn weather(&self) -> MutexGuard<'_, Weather> {
        self.air.weather.lock().unwrap()
    }

    /// From now on, datagrams come from another port: a router has forgotten the dialler.
    pub(super) fn rebind(&self) {
        self.air.rebind.notify_one();
    }
}

impl Drop for Relay {
    fn drop(&mut self) {
        self.air.stop.notify_one();
        let _ = self.thread.take().unwrap().join();
    }
}

async fn carry(air: Arc<Air>, front: UdpSocket, to: SocketAddr) {
    let front = Arc::new(front);
    let dialler = Arc::new(Mutex::new(None));
    let mut bytes = vec![0; 1 << 16];
    loop {
        let behind = Arc::new(UdpSocket::bind(LOOPBACK).await.unwrap());
        behind.connect(to).await.unwrap();
        let back = {
            let (air, front, behind, dialler) = (air.clone(), front.clone(), behind.clone(), dialler.clone());
            tokio::spawn(async move {
                let mut bytes = vec![0; 1 << 16];
                loop {
                    let Ok(count) = behind.recv(&mut bytes).await else { continue };
                    let known = *dialler.lock().unwrap();
                    if let Some(dialler) = known {
                        let (front, datagram) = (front.clone(), bytes[..count].to_vec());
                        air.send(async move { drop(front.send_to(&datagram, dialler).await) });
                    }
                }
            })
        };
        loop {
            tokio::select! {
                came = front.recv_from(&mut bytes) => {
                    let Ok((count, from)) = came else { continue };
                    *dialler.lock().unwrap() = Some(from);
                    let (behind, datagram) = (behind.clone(), bytes[..count].to_vec());
                    air.send(async move { drop(behind.send(&datagram).await) });
                }
                () = air.rebind.notified() => break,
            }
        }
        back.abort();
    }
}

impl Air {
    fn send(&self, datagram: impl Future<Output = ()> + Send + 'static) {
        let mut weather = self.weather.lock().unwrap();
        // xorshift64
        weather.random ^= weather.random << 13;
        weather.random ^= weather.random >> 7;
        weather.random ^= weather.random << 17;
        let is_lost = weather.loses_one_in > 0 && weather.random.is_multiple_of(weather.loses_one_in);
        if weather.is_dark || is_lost {
            return;
        }
        let delay = weather.delay;
        tokio::spawn(async move {
            tokio::time::sleep(delay).await;
            datagram.await;
        });
    }
}
