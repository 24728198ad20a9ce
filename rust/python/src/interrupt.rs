//! Runs all long work: detaches from the interpreter, polls for Ctrl-C, catches panics.
//!
//! ```text
//! calling thread:  spawn ──> wait 40 ms ──> signals? progress? ──> wait 40 ms ... ──> result
//! pool:            └──────────── work, polls the Monitor ───────────────────────────┘
//! ```
//!
//! Work that takes less time than handing it to the pool runs on the calling thread.

use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::Duration;

use exactknn_core::{Error, Monitor, PoolHandle, Report, Result};
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::Threads;
use crate::error::IntoPy;

/// The interval at which a waiting caller polls for signals. Ctrl-C takes effect within about twice this time.
const POLL_INTERVAL: Duration = Duration::from_millis(40);

thread_local! {
    static LAST: Cell<Option<Report>> = const { Cell::new(None) };
}

/// Statistics of the last search of this thread.
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

/// [`run`] a search, and store its report for [`last_search`].
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

/// Run `work` detached from the interpreter; `progress` is called with the finished fraction at each poll.
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
                // Cannot fail: the receiver waits for this message.
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

/// Run signal handlers, whose exceptions are returned, and report progress.
fn poll(py: Python<'_>, monitor: &Monitor, progress: Option<&Py<PyAny>>) -> PyResult<()> {
    py.check_signals()?;
    if let Some(progress) = progress {
        progress.call1(py, (monitor.fraction(),))?;
    }
    Ok(())
}

/// Turn a panic of the core into an error that asks for a bug report; it must not end the caller's process.
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
