//! `_core.knn`: arguments in, arrays out.

use std::cell::Cell;
use std::num::NonZero;

use exactknn_core::{
    Argument, Error, Metric, Neighbours, Options, Report, Search, active_level, bf16, f16, num_threads,
};
use numpy::{IntoPyArray, PyArrayMethods, PyUntypedArray};
use pyo3::exceptions::{PyOverflowError, PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::Threads;
use crate::array::{Kind, Stored, borrow, common_kind, matrix};
use crate::error::IntoPy;
use crate::interrupt;

/// An integer argument; one that no machine word holds is a `ValueError` like any other that is too large.
pub(crate) fn integer(argument: &str, given: &Bound<'_, PyAny>) -> PyResult<isize> {
    given.extract().map_err(|error: PyErr| {
        if error.is_instance_of::<PyOverflowError>(given.py()) {
            PyValueError::new_err(format!("{argument} must be below 2**63, got {given}"))
        } else {
            PyTypeError::new_err(format!("{argument} must be an integer, got {}", given.get_type()))
        }
    })
}

/// An integer argument of at least 0.
pub(crate) fn count(argument: &str, given: &Bound<'_, PyAny>) -> PyResult<usize> {
    let given = integer(argument, given)?;
    usize::try_from(given).map_err(|_| PyValueError::new_err(format!("{argument} must be at least 0, got {given}")))
}

/// A thread count given by the caller.
pub(crate) fn positive_threads(given: &Bound<'_, PyAny>) -> PyResult<Threads> {
    let given = integer("num_threads", given)?;
    usize::try_from(given)
        .ok()
        .and_then(NonZero::new)
        .ok_or_else(|| Error::BadThreads { given: given.to_string(), origin: "" })
        .into_py()
}

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

/// The threads of one call: those asked for, else those of the process.
pub(crate) fn threads_or_default(asked: Option<Threads>) -> PyResult<Threads> {
    match asked {
        Some(threads) => Ok(threads),
        None => Ok(NonZero::new(num_threads().into_py()?).unwrap_or(NonZero::<usize>::MIN)),
    }
}

/// The arguments of [`knn`] that do not depend on the element type.
struct Call {
    k: usize,
    metric: Metric,
    exclude_self: bool,
    num_threads: Option<Threads>,
}

/// The k nearest reference rows of each query row.
#[pyfunction]
#[pyo3(signature = (query, reference, k, metric, *, exclude_self=false, bfloat16=false, num_threads=None, progress=None, p=None))]
#[expect(clippy::too_many_arguments, reason = "the signature of the Python function")]
pub(crate) fn knn<'py>(
    query: &Bound<'py, PyUntypedArray>,
    reference: Option<&Bound<'py, PyUntypedArray>>,
    k: &Bound<'py, PyAny>,
    metric: &str,
    exclude_self: bool,
    bfloat16: bool,
    num_threads: Option<&Bound<'py, PyAny>>,
    progress: Option<&Bound<'py, PyAny>>,
    p: Option<f64>,
) -> PyResult<(Py<PyAny>, Py<PyAny>)> {
    let py = query.py();
    let reference = reference.unwrap_or(query);
    let call = Call {
        k: count("k", k)?,
        metric: Metric::parse(metric, p).into_py()?,
        exclude_self,
        num_threads: num_threads.map(positive_threads).transpose()?,
    };
    match common_kind(query, reference, bfloat16)? {
        Kind::F32 => run::<f32>(py, query, reference, &call, progress),
        Kind::F64 => run::<f64>(py, query, reference, &call, progress),
        Kind::F16 => run::<f16>(py, query, reference, &call, progress),
        Kind::Bf16 => run::<bf16>(py, query, reference, &call, progress),
    }
}

fn run<'py, E: Stored>(
    py: Python<'py>,
    query: &Bound<'py, PyUntypedArray>,
    reference: &Bound<'py, PyUntypedArray>,
    call: &Call,
    progress: Option<&Bound<'py, PyAny>>,
) -> PyResult<(Py<PyAny>, Py<PyAny>)>
where
    E::Output: numpy::Element,
{
    let query = borrow::<E>(query, Argument::Query)?;
    let reference = borrow::<E>(reference, Argument::Reference)?;
    let threads = threads_or_default(call.num_threads)?;
    let options = Options {
        k: call.k,
        metric: call.metric,
        exclude_self: call.exclude_self,
        simd: active_level().into_py()?,
        threads,
    };
    let (query, reference) = (matrix::<E>(&query, Argument::Query)?, matrix::<E>(&reference, Argument::Reference)?);
    let search = Search::new(query, reference, options).into_py()?;
    let (Neighbours { values, rows }, report) = interrupt::run(
        py,
        threads,
        || search.is_small(),
        progress,
        |monitor| Ok((search.run(monitor)?, monitor.report())),
    )?;
    LAST.set(Some(report));
    let shape = [query.rows(), call.k];
    let values = values.into_pyarray(py).reshape(shape)?;
    let rows = rows.into_pyarray(py).reshape(shape)?;
    Ok((values.into_any().unbind(), rows.into_any().unbind()))
}
