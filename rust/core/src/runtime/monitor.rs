//! The channel between a running search and its caller: a cancel flag one way, progress and a report the other.

use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering};

use crate::error::{Error, Result};

/// Elements that a loop handles between two polls: a few milliseconds of copying or sorting.
pub(crate) const POLLED: usize = 1 << 18;

/// The names of the filters in a [`Report`], in the order of their numbers.
pub(crate) const FILTERS: [&str; 4] = ["none", "unpacked", "float32", "int8"];

/// Shared by a search and its caller. The core polls its cancel flag; signals are handled by the bindings.
#[derive(Debug)]
pub struct Monitor {
    cancelled: AtomicBool,
    polls: AtomicU64,
    /// The poll that cancels, if polls are counted.
    cancel_at: Option<u64>,
    done: AtomicU64,
    total: AtomicU64,
    rescored: AtomicU64,
    false_positives: AtomicU64,
    filter: AtomicU8,
}

/// Statistics of a search.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Report {
    /// The filter: `int8`, `float32`, `unpacked` (float32 keys of the rows as passed) or `none`. The last one if the search
    /// stepped down.
    pub filter: &'static str,
    /// Number of pairs that got their float64 value.
    pub rescored: u64,
}

impl Default for Monitor {
    fn default() -> Self {
        Self::new()
    }
}

impl Monitor {
    /// A monitor for a new search.
    pub fn new() -> Self {
        // Polls are not counted: all threads would write to one number.
        Self::with(None)
    }

    /// A monitor that counts the polls of its search, and cancels it at the given one, from 1: an interrupt at any place,
    /// without a clock.
    pub fn cancelling_at(poll: u64) -> Self {
        Self::with(Some(poll))
    }

    fn with(cancel_at: Option<u64>) -> Self {
        Self {
            cancelled: AtomicBool::new(false),
            polls: AtomicU64::new(0),
            cancel_at,
            done: AtomicU64::new(0),
            total: AtomicU64::new(0),
            rescored: AtomicU64::new(0),
            false_positives: AtomicU64::new(0),
            filter: AtomicU8::new(0),
        }
    }

    /// How often the search has polled so far; 0 unless polls are counted.
    pub fn polls(&self) -> u64 {
        self.polls.load(Ordering::Relaxed)
    }

    /// Cancel the search. It polls between blocks of work, every few milliseconds for rows of usual width.
    pub fn cancel(&self) {
        // Relaxed: the flag protects no data.
        self.cancelled.store(true, Ordering::Relaxed);
    }

    /// The finished fraction of the work, between 0 and 1.
    pub fn fraction(&self) -> f64 {
        let total = self.total.load(Ordering::Relaxed);
        if total == 0 { 0.0 } else { (self.done.load(Ordering::Relaxed) as f64 / total as f64).min(1.0) }
    }

    /// `Err(Cancelled)` once the search is cancelled.
    pub(crate) fn check(&self) -> Result<()> {
        if self.cancel_at.is_some_and(|last| self.polls.fetch_add(1, Ordering::Relaxed) + 1 >= last) {
            self.cancel();
        }
        if self.cancelled.load(Ordering::Relaxed) { Err(Error::Cancelled) } else { Ok(()) }
    }

    /// Start counting; the search has `total` units of work.
    pub(crate) fn begin(&self, total: u64) {
        self.total.store(total.max(1), Ordering::Relaxed);
        self.done.store(0, Ordering::Relaxed);
    }

    /// Set the number of the current filter, an index into [`FILTERS`].
    pub(crate) fn set_filter(&self, number: u8) {
        self.filter.store(number, Ordering::Relaxed);
    }

    /// Count pairs that got their float64 value, and the false positives among them, which a sharper filter would have
    /// rejected.
    pub(crate) fn count_rescored(&self, rescored: u64, false_positives: u64) {
        self.rescored.fetch_add(rescored, Ordering::Relaxed);
        self.false_positives.fetch_add(false_positives, Ordering::Relaxed);
    }

    /// Both counts so far.
    pub(crate) fn rescored(&self) -> (u64, u64) {
        (self.rescored.load(Ordering::Relaxed), self.false_positives.load(Ordering::Relaxed))
    }

    /// The statistics so far.
    pub fn report(&self) -> Report {
        let filter = FILTERS[usize::from(self.filter.load(Ordering::Relaxed)).min(FILTERS.len() - 1)];
        Report { filter, rescored: self.rescored.load(Ordering::Relaxed) }
    }

    /// Count finished units.
    pub(crate) fn advance(&self, units: u64) {
        self.done.fetch_add(units, Ordering::Relaxed);
    }
}
