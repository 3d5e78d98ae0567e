//! Tracks the part of the ring that appends under way may still write to.
//!
//! A slot can be void while its owner, stopped at the wrong moment, still has bytes to store into it. If the space were
//! used for another record meanwhile, those late bytes would damage it. So every append first pins the head that it
//! sees, and no append reserves space that laps a pin. A stopped append blocks no other until the ring has gone once
//! round. From then on it holds back its own and later space only.
//!
//! Pins live in the session's own memory. SharedFS writes to the ring only under its own lock (`daemon_lock`), under
//! which the head stands still.
//!
//! Most pins are set by a plain store: the first threads have a place of their own. Other threads see it in time, since
//! the exchange that reserves the slot comes after it. A thread that checks the pins has read the head before. If that
//! was before the reservation, the head was not above the slot's start, and no space of the slot can be reused by that
//! check. If it was after, the pin was seen. A thread that settles an older slot before its reservation writes to the
//! ring, and has a fence there.

use std::cell::Cell;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering, compiler_fence, fence};

use ashlar_types::LogPosition;

/// The most appends under way at once; one more gets `Full`. They are fewer than the slots, so that slots never run
/// out.
const PINS: usize = 192;
/// Threads that have a place of their own: the first ones that append, in any log, even after they have ended.
///
/// All other threads share the rest.
const OWNED: usize = 64;
const FREE: u64 = u64::MAX;

/// A pin alone on its cache line, since every append writes its own pin twice.
#[repr(align(64))]
struct Place(AtomicU64);

pub(crate) struct Pins(Box<[Place]>);

/// A pin in force; dropping it removes it.
#[derive(Debug)]
pub struct Pin<'a>(&'a AtomicU64);

impl Pins {
    pub(crate) fn new() -> Self {
        Self((0..PINS).map(|_| Place(AtomicU64::new(FREE))).collect())
    }

    /// Pins the position that `head` returns, from this thread's next exchange on; none if all pins are taken.
    #[inline]
    pub(crate) fn pin<E>(&self, head: impl Fn() -> Result<u64, E>) -> Result<Option<Pin<'_>>, E> {
        let own = own_place();
        let position = head()?;
        if own < OWNED {
            let place = &self.0[own].0;
            // Only a signal handler runs in between, and it removes its pin before it returns.
            if place.load(Ordering::Relaxed) == FREE {
                place.store(position, Ordering::Release);
                barrier_before_exchange();
                return Ok(Some(Pin(place)));
            }
        }
        Ok(self.pin_shared(own, position))
    }

    #[cold]
    fn pin_shared(&self, first: usize, position: u64) -> Option<Pin<'_>> {
        (0..PINS - OWNED).find_map(|step| {
            let place = &self.0[OWNED + (first + step) % (PINS - OWNED)].0;
            place.compare_exchange(FREE, position, Ordering::SeqCst, Ordering::Relaxed).ok()?;
            fence(Ordering::SeqCst);
            Some(Pin(place))
        })
    }

    /// Returns the lowest pinned position; the caller has read the head before.
    pub(crate) fn lowest(&self) -> LogPosition {
        fence(Ordering::SeqCst);
        LogPosition(self.0.iter().map(|place| place.0.load(Ordering::SeqCst)).min().unwrap_or(FREE))
    }
}

impl Pin<'_> {
    /// Moves the pin up to the head. The append must hold no slot.
    pub(crate) fn renew<E>(&self, head: impl Fn() -> Result<u64, E>) -> Result<(), E> {
        let position = head()?;
        self.0.store(position, Ordering::SeqCst);
        self.hold(position, head)
    }

    /// Ensures that the head did not move before other threads could see the pin.
    ///
    /// A thread that missed the pin then saw a head that is not above the pinned position.
    #[inline]
    fn hold<E>(&self, mut position: u64, head: impl Fn() -> Result<u64, E>) -> Result<(), E> {
        loop {
            fence(Ordering::SeqCst);
            let now = head()?;
            if now == position {
                return Ok(());
            }
            position = now;
            self.0.store(position, Ordering::SeqCst);
        }
    }
}

impl Drop for Pin<'_> {
    fn drop(&mut self) {
        self.0.store(FREE, Ordering::Release);
    }
}

/// Makes a store visible before a sequentially consistent exchange that follows.
///
/// On x86 the exchange is a full barrier itself; another one would cost as much as the exchange.
#[inline]
fn barrier_before_exchange() {
    if cfg!(target_arch = "x86_64") { compiler_fence(Ordering::SeqCst) } else { fence(Ordering::SeqCst) }
}

/// Returns this thread's place, if it is below [`OWNED`]; otherwise the place at which to look for a free one first.
#[inline]
fn own_place() -> usize {
    const UNKNOWN: usize = usize::MAX;
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    thread_local! {
        static PLACE: Cell<usize> = const { Cell::new(UNKNOWN) };
    }
    PLACE.with(|place| {
        if place.get() == UNKNOWN {
            place.set(NEXT.fetch_add(1, Ordering::Relaxed));
        }
        place.get()
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::convert::Infallible;

    #[test]
    fn lowest_pin_holds_until_it_is_lifted() {
        let pins = Pins::new();
        let at = |position: u64| move || Ok::<_, Infallible>(position);
        assert_eq!(pins.lowest(), LogPosition(FREE));
        let high = pins.pin(at(80)).unwrap().unwrap();
        let low = pins.pin(at(16)).unwrap().unwrap();
        assert_eq!(pins.lowest(), LogPosition(16));
        low.renew(at(96)).unwrap();
        assert_eq!(pins.lowest(), LogPosition(80));
        drop(high);
        assert_eq!(pins.lowest(), LogPosition(96));
        drop(low);
        assert_eq!(pins.lowest(), LogPosition(FREE));
    }

    #[test]
    fn renewed_pin_follows_a_moving_head() {
        let pins = Pins::new();
        let head = Cell::new(0);
        let moving = || {
            head.set((head.get() + 8).min(40));
            Ok::<_, Infallible>(head.get())
        };
        let pin = pins.pin(moving).unwrap().unwrap();
        pin.renew(moving).unwrap();
        assert_eq!(pins.lowest(), LogPosition(40));
    }

    #[test]
    fn pin_is_refused_when_all_are_taken() {
        let pins = Pins::new();
        let take = || pins.pin(|| Ok::<_, Infallible>(8)).unwrap();
        let all: Vec<_> = std::iter::from_fn(take).take(PINS + 1).collect();
        // One place is this thread's own, and the rest are the shared ones.
        assert!(all.len() == PINS - OWNED + 1 || all.len() == PINS - OWNED);
        assert!(take().is_none());
        drop(all);
        assert!(take().is_some());
    }

    #[test]
    fn concurrent_pins_never_share_a_place() {
        let pins = Pins::new();
        std::thread::scope(|scope| {
            for thread in 1..9u64 {
                let pins = &pins;
                scope.spawn(move || {
                    for round in 0..10_000u64 {
                        let position = round * 64 + thread * 8;
                        let pin = pins.pin(|| Ok::<_, Infallible>(position)).unwrap().unwrap();
                        let nested = pins.pin(|| Ok::<_, Infallible>(position + 1)).unwrap().unwrap();
                        assert_eq!(pin.0.load(Ordering::SeqCst), position);
                        drop(nested);
                        assert_eq!(pin.0.load(Ordering::SeqCst), position);
                    }
                });
            }
        });
        assert_eq!(pins.lowest(), LogPosition(FREE));
    }
}
