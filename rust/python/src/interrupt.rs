//! Runs all long work: detaches from the interpreter, polls for Ctrl-C, catches panics.
//!
//! ```text
//! calling thread:  spawn ──> wait 40 ms ──> signals? progress? ──> wait 40 ms ... ──> result
//! pool:            └──────────── work, polls the Monitor ───────────────────────────┘
//! ```
//!
//! Work that takes less time than handing it to the pool runs on the calling thread.

use std::cell::Cell;
use std::time::Duration;

use exactknn_core::{Monitor, PoolHandle, Report, Result, catch_panic};
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
        PoolHandle::get(threads)?.watch(
            || work(&monitor),
            POLL_INTERVAL,
            || {
                if interruption.is_none()
                    && let Err(error) = Python::attach(|py| poll(py, &monitor, progress.as_ref()))
                {
                    *interruption = Some(error);
                    monitor.cancel();
                }
            },
        )
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
