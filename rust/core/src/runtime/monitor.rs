//! The one channel between a running search and whoever waits for it: a stop flag one way, progress the other.

use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering};

use crate::error::{Error, Result};

/// What a [`Report`] calls each filter, in the order of their numbers.
pub(crate) const FILTERS: [&str; 4] = ["none", "unpacked", "float32", "int8"];

/// Shared by a search and its caller. The core only asks whether it shall stop; it knows nothing of signals.
#[derive(Debug, Default)]
pub struct Monitor {
    cancelled: AtomicBool,
    done: AtomicU64,
    total: AtomicU64,
    rescored: AtomicU64,
    false_positives: AtomicU64,
    filter: AtomicU8,
}

/// How a search went; for benchmarks and the curious.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Report {
    /// What decided which pairs needed a float64 value: `int8`, `float32`, `unpacked` (float32 rows as passed) or `none`. The
    /// last one, if the search stepped down.
    pub filter: &'static str,
    /// Pairs that got their float64 value.
    pub rescored: u64,
}

impl Monitor {
    /// A monitor that nothing has stopped yet.
    pub fn new() -> Self {
        Self::default()
    }

    /// Ask the search to stop; it looks between blocks of work, a few milliseconds apart
    /// for rows of ordinary width.
    pub fn cancel(&self) {
        // Relaxed: the flag guards no data.
        self.cancelled.store(true, Ordering::Relaxed);
    }

    /// The fraction of the work that is done, between 0 and 1.
    pub fn fraction(&self) -> f64 {
        let total = self.total.load(Ordering::Relaxed);
        if total == 0 { 0.0 } else { (self.done.load(Ordering::Relaxed) as f64 / total as f64).min(1.0) }
    }

    /// `Err(Cancelled)` once somebody asked to stop.
    pub(crate) fn check(&self) -> Result<()> {
        if self.cancelled.load(Ordering::Relaxed) { Err(Error::Cancelled) } else { Ok(()) }
    }

    /// State how many units the whole search has.
    pub(crate) fn begin(&self, total: u64) {
        self.total.store(total.max(1), Ordering::Relaxed);
        self.done.store(0, Ordering::Relaxed);
    }

    /// State the number (an index into [`FILTERS`]) of the filter at work.
    pub(crate) fn set_filter(&self, number: u8) {
        self.filter.store(number, Ordering::Relaxed);
    }

    /// Count pairs that got their float64 value, and those among them that a sharper filter would have left out.
    pub(crate) fn count_rescored(&self, rescored: u64, false_positives: u64) {
        self.rescored.fetch_add(rescored, Ordering::Relaxed);
        self.false_positives.fetch_add(false_positives, Ordering::Relaxed);
    }

    /// Both counts so far.
    pub(crate) fn rescored(&self) -> (u64, u64) {
        (self.rescored.load(Ordering::Relaxed), self.false_positives.load(Ordering::Relaxed))
    }

    /// How the search went.
    pub fn report(&self) -> Report {
        let filter = FILTERS[usize::from(self.filter.load(Ordering::Relaxed)).min(FILTERS.len() - 1)];
        Report { filter, rescored: self.rescored.load(Ordering::Relaxed) }
    }

    /// Count finished units.
    pub(crate) fn advance(&self, units: u64) {
        self.done.fetch_add(units, Ordering::Relaxed);
    }
}
