//! The one channel between a running search and whoever waits for it: a stop flag one way, progress the other.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use crate::error::{Error, Result};

/// Shared by a search and its caller. The core only asks [`Monitor::check`]; it knows nothing of signals.
#[derive(Debug, Default)]
pub struct Monitor {
    cancelled: AtomicBool,
    done: AtomicU64,
    total: AtomicU64,
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

    /// Count finished units.
    pub(crate) fn advance(&self, units: u64) {
        self.done.fetch_add(units, Ordering::Relaxed);
    }
}
