//! How the head ends a pipeline that is lost, and what it puts in its place.

use std::ops::Range;
use std::rc::Rc;

use super::super::network::{HEAD, Micros, Network};
use super::super::stages::{Plan, Station, proof};
use super::super::{End, LAYERS, Payload};
use super::{Head, OPEN_PATIENCE, PAUSE_PATIENCE, State};
use crate::schedule::{Kept, Limits, RequestId};

impl Head {
    /// As `Head::suspend` and `Pipeline::close`: nothing is to be expected of the pipeline.
    pub(super) fn lost(&mut self, why: &'static str, network: &mut Network, station: &mut Station) {
        match self.state {
            State::Running => self.past = Some(self.epoch),
            State::Opening { .. } => {}
            State::Pausing { .. } | State::Seeking { .. } | State::Down => return,
        }
        *self.losses.entry(why).or_default() += 1;
        self.in_flight.clear();
        self.to_send.clear();
        self.leave_hops(network);
        station.pause(network);
        let waits = self.workers();
        for host in &waits {
            self.controls[*host].to_say.push_back(Payload::Pause);
        }
        let waits = waits.into_iter().chain([HEAD]).collect();
        self.state = State::Pausing { until: network.now + PAUSE_PATIENCE, waits };
        network.wake(HEAD, network.now);
    }

    fn is_usable(&self, host: usize, network: &mut Network) -> bool {
        host == HEAD || self.controls[host].id.is_some_and(|id| network.is_up(HEAD, id))
    }

    /// What runs where, if there are enough hosts by now.
    pub(super) fn seek(&mut self, since: Micros, network: &mut Network) -> Option<(Vec<usize>, Vec<Range<usize>>)> {
        let waited = network.now - since;
        let planned = |plan: &Rc<Plan>| (plan.places.clone(), plan.layers.clone());
        let current = self.plan.as_ref().map_or_else(|| self.first.clone(), planned);
        let hosts: Vec<usize> = (0..self.room.len()).filter(|host| self.is_usable(*host, network)).collect();
        let is_good = |host: &usize| hosts.contains(host) && !self.bad.contains(host);
        if current.0.iter().all(is_good) {
            return Some(current);
        }
        if waited < self.patience.0 && self.bad.is_empty() {
            return None;
        }
        // Others in the places of those that are lost.
        let (mut places, layers) = current;
        for stage in 0..places.len() {
            if !is_good(&places[stage]) {
                let lost = places[stage];
                let wanted: usize = (0..layers.len()).filter(|i| places[*i] == lost).map(|i| layers[i].len()).sum();
                let is_spare = |host: &&usize| is_good(host) && !places.contains(host) && self.room[**host] >= wanted;
                if let Some(other) = hosts.iter().find(is_spare).copied() {
                    places.iter_mut().filter(|place| **place == lost).for_each(|place| *place = other);
                }
            }
        }
        if places.iter().all(is_good) {
            return Some((places, layers));
        }
        if waited < self.patience.1 && self.bad.is_empty() {
            return None;
        }
        // Those that are left divide the layers.
        let left: Vec<usize> =
            hosts.iter().copied().filter(|host| !self.bad.contains(host) && self.room[*host] > 0).collect();
        if left.iter().map(|host| self.room[*host]).sum::<usize>() >= LAYERS {
            return Some(divide(&left, &self.room));
        }
        self.bad.clear();
        None
    }

    pub(super) fn begin(
        &mut self,
        (places, layers): (Vec<usize>, Vec<Range<usize>>),
        network: &mut Network,
        station: &mut Station,
    ) {
        let is_first_cut = layers == self.first.1;
        self.recuts += u64::from(self.plan.as_ref().is_some_and(|plan| plan.layers != layers));
        let stages = places.len();
        let crossing =
            |hop: usize| hop.checked_sub(1).map_or(HEAD, |i| places[i]) != places.get(hop).copied().unwrap_or(HEAD);
        let in_flight = 2 * stages + 1 + (0..=stages).filter(|hop| crossing(*hop)).count();
        // Another cut may leave less room on the tightest.
        let pages = if is_first_cut || !self.tightens { self.pages } else { self.pages * 3 / 4 + 1 };
        let limits = Limits { stages, pages, in_flight, ..self.limits };
        let credits = self.random.between(1, in_flight + 1) as u64;
        let after = self.past;
        let plan = Rc::new(Plan {
            session: self.random.bits() & !1,
            epoch: after.unwrap_or(0) + 1,
            after,
            places,
            layers,
            pages,
            sequences: limits.sequences,
            credits,
            boundary_log: self.boundary_log,
        });
        (self.limits, self.plan) = (limits, Some(plan.clone()));
        let capacity = limits.capacity();
        self.capacity = (self.capacity.0.min(capacity), self.capacity.1.max(capacity));
        station.prepare(&plan, network);
        for host in self.workers() {
            self.controls[host].to_say.push_back(Payload::Prepare(plan.clone()));
        }
        let until = network.now + OPEN_PATIENCE;
        let (ready, linked) = (vec![None; stages], vec![false; stages]);
        self.state = State::Opening { until, ready, linked, proved: [false; 2], is_started: false };
        self.has_planned = true;
        network.wake(HEAD, network.now);
    }

    pub(super) fn open(&mut self, network: &mut Network, station: &mut Station) -> bool {
        let plan = self.plan.clone().expect("a pipeline is opened");
        let State::Opening { until, ready, linked, proved, is_started } = &mut self.state else { return false };
        if *until <= network.now {
            self.lost("it does not come about", network, station);
            return true;
        }
        if ready.iter().any(Option::is_none) {
            return false;
        }
        if !*is_started {
            *is_started = true;
            station.start(network);
            for host in self.workers() {
                self.controls[host].to_say.push_back(Payload::Start);
            }
            network.wake(HEAD, network.now);
            return true;
        }
        if !proved[0] {
            proved[0] = station.send_first(&plan, (proof(&plan), Payload::Proof), network);
        }
        if !proved[1] {
            match station.receive_last(&plan, network) {
                Ok(None) => {}
                Ok(Some((_, payload))) => {
                    assert!(matches!(payload, Payload::Proof), "nothing else comes first");
                    proved[1] = true;
                    return true;
                }
                Err(()) => {
                    self.lost("the tail is gone at first", network, station);
                    return true;
                }
            }
        }
        if *proved != [true; 2] || linked.contains(&false) {
            return false;
        }
        let kept: Vec<Kept> = ready.iter_mut().map(|kept| kept.take().expect("all are ready")).collect();
        self.epoch = plan.epoch;
        self.seen = vec![(0, 0, network.clock(HEAD)); plan.places.len()];
        self.heard = network.clock(HEAD);
        self.opened += 1;
        self.state = State::Running;
        self.bad.clear();
        // As `Head::recover`.
        let rebuild = self.scheduler.recover(self.limits, Vec::new(), &kept);
        self.restored += rebuild.tokens as u64;
        self.restores = rebuild.tokens > 0 && !rebuild.is_over();
        for request in self.scheduler.too_long() {
            self.end(request, End::TooLong);
            self.scheduler.cancel(request);
        }
        true
    }

    pub(super) fn fail(&mut self) {
        self.state = State::Down;
        let running: Vec<RequestId> =
            self.asked.iter().filter(|asked| asked.end.is_none()).filter_map(|asked| asked.id).collect();
        for id in running {
            self.end(id, End::Failed);
            self.scheduler.cancel(id);
        }
    }
}

/// Layers over hosts, by their room.
pub fn divide(hosts: &[usize], room: &[usize]) -> (Vec<usize>, Vec<Range<usize>>) {
    let (mut places, mut layers, mut from) = (Vec::new(), Vec::new(), 0);
    for (at, host) in hosts.iter().enumerate() {
        let behind: usize = hosts[at + 1..].iter().map(|host| room[*host]).sum();
        let fair = (LAYERS - from).div_ceil(hosts.len() - at);
        let count = fair.max((LAYERS - from).saturating_sub(behind)).min(room[*host]).min(LAYERS - from);
        if count > 0 {
            places.push(*host);
            layers.push(from..from + count);
            from += count;
        }
    }
    (places, layers)
}
