//! The one door for long work: detaches from the interpreter, watches for Ctrl-C, keeps panics inside.
//!
//! ```text
//! calling thread:  spawn ──> wait 40 ms ──> signals? progress? ──> wait 40 ms ... ──> result
//! pool:            └──────────── work, asks the Monitor ────────────────────────────┘
//! ```
//!
//! Work that is over before a hand-over would be runs where it is called.

use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::Duration;

use exactknn_core::{Error, Monitor, PoolHandle, Report, Result};
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::Threads;
use crate::error::IntoPy;

/// How often a waiting caller checks for signals: Ctrl-C is answered within twice this time.
const POLL_INTERVAL: Duration = Duration::from_millis(40);

thread_local! {
    static LAST: Cell<Option<Report>> = const { Cell::new(None) };
}

/// How the last search of this thread went.
#[pyfunction]
pub(crate) fn last_search(py: Python<'_>) -> PyResult<Option<Bound<'_, PyDict>>> {
    LAST.get()
        .map(|report| {
            let facts = PyDict::new(py);
            facts.set_item("filter", report.filter)?;
            facts.set_item("rescored", report.rescored)?;
            Ok(facts)
        })
        .transpose()
}

/// [`run`] a search, and keep its report for [`last_search`].
pub(crate) fn search<T: Send>(
    py: Python<'_>,
    threads: Threads,
    is_small: impl FnOnce() -> bool,
    progress: Option<&Bound<'_, PyAny>>,
    work: impl FnOnce(&Monitor) -> Result<T> + Send,
) -> PyResult<T> {
    let (found, report) = run(py, threads, is_small, progress, |monitor| Ok((work(monitor)?, monitor.report())))?;
    LAST.set(Some(report));
    Ok(found)
}

/// Run `work` without the interpreter; `progress` is told the finished fraction now and then.
pub(crate) fn run<T: Send>(
    py: Python<'_>,
    threads: Threads,
    is_small: impl FnOnce() -> bool,
    progress: Option<&Bound<'_, PyAny>>,
    work: impl FnOnce(&Monitor) -> Result<T> + Send,
) -> PyResult<T> {
    let monitor = Monitor::new();
    if catch_panic(|| Ok(is_small())).into_py()? {
        let outcome = py.detach(|| catch_panic(|| work(&monitor))).into_py()?;
        if let Some(progress) = progress {
            progress.call1((1.0,))?;
        }
        return Ok(outcome);
    }
    let progress = progress.map(|callback| callback.clone().unbind());
    let interruption = &mut None;
    let outcome = py.detach(|| {
        let pool = PoolHandle::get(threads)?;
        let (send, receive) = channel();
        let monitor = &monitor;
        pool.pool().in_place_scope(|scope| {
            scope.spawn(move |_| {
                // The receiver waits for exactly this message; it cannot be gone.
                let _ = send.send(catch_panic(|| work(monitor)));
            });
            loop {
                match receive.recv_timeout(POLL_INTERVAL) {
                    Ok(outcome) => return outcome,
                    Err(RecvTimeoutError::Timeout) => {
                        if interruption.is_none()
                            && let Err(error) = Python::attach(|py| poll(py, monitor, progress.as_ref()))
                        {
                            *interruption = Some(error);
                            monitor.cancel();
                        }
                    }
                    Err(RecvTimeoutError::Disconnected) => {
                        return Err(Error::Panic("a worker ended without a result".into()));
                    }
                }
            }
        })
    });
    if let Some(error) = interruption.take() {
        return Err(error);
    }
    let outcome = outcome.into_py()?;
    if let Some(progress) = &progress {
        progress.call1(py, (1.0,))?;
    }
    Ok(outcome)
}

/// Raise what a signal handler raises, and report progress.
fn poll(py: Python<'_>, monitor: &Monitor, progress: Option<&Py<PyAny>>) -> PyResult<()> {
    py.check_signals()?;
    if let Some(progress) = progress {
        progress.call1(py, (monitor.fraction(),))?;
    }
    Ok(())
}

/// A panic of the core is a bug to be reported, not the end of the caller's process.
fn catch_panic<T>(work: impl FnOnce() -> Result<T>) -> Result<T> {
    catch_unwind(AssertUnwindSafe(work)).unwrap_or_else(|payload| {
        let text = payload
            .downcast_ref::<&str>()
            .map(|text| (*text).to_owned())
            .or_else(|| payload.downcast_ref::<String>().cloned())
            .unwrap_or_else(|| "no message".to_owned());
        Err(Error::Panic(text))
    })
}
