//! Parsing of the arguments that calls share: integers, threads, the metric, own rows; and the dispatch by element type.

use std::num::NonZero;

use exactknn_core::{Error, Metric, SelfRule, capped_threads, is_num_threads_set, num_threads};
use numpy::PyUntypedArray;
use pyo3::exceptions::{PyOverflowError, PyTypeError, PyValueError};
use pyo3::prelude::*;

use crate::Threads;
use crate::array::{borrow_integers, integers};
use crate::error::IntoPy;

/// Run `$body` with `$element` as the element type of a kind.
macro_rules! with_element {
    ($kind:expr, $element:ident => $body:expr) => {
        match $kind {
            $crate::array::Kind::F32 => {
                type $element = f32;
                $body
            }
            $crate::array::Kind::F64 => {
                type $element = f64;
                $body
            }
            $crate::array::Kind::F16 => {
                type $element = exactknn_core::f16;
                $body
            }
            $crate::array::Kind::Bf16 => {
                type $element = exactknn_core::bf16;
                $body
            }
        }
    };
}
pub(crate) use with_element;

/// An integer argument. One that overflows is a `ValueError`, like any other that is too large.
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

/// A number of threads passed by the caller.
pub(crate) fn positive_threads(given: &Bound<'_, PyAny>) -> PyResult<Threads> {
    let given = integer("num_threads", given)?;
    usize::try_from(given)
        .ok()
        .and_then(NonZero::new)
        .map(capped_threads)
        .ok_or_else(|| Error::BadThreads { given: given.to_string(), origin: "" })
        .into_py()
}

/// The threads of a call: the argument, or the setting of the process.
pub(crate) fn threads(given: Option<&Bound<'_, PyAny>>) -> PyResult<Threads> {
    match given {
        Some(given) => positive_threads(given),
        None => default_threads(),
    }
}

/// The threads of a call without the argument: the setting of the process, else 1 in a worker of a torch `DataLoader`, where
/// torch uses one thread too, else the cores.
pub(crate) fn default_threads() -> PyResult<Threads> {
    if !is_num_threads_set() && Python::attach(is_loader_worker) {
        return Ok(NonZero::<usize>::MIN);
    }
    Ok(NonZero::new(num_threads().into_py()?).unwrap_or(NonZero::<usize>::MIN))
}

/// Whether this process is a worker of a torch `DataLoader`; torch is not imported for it.
fn is_loader_worker(py: Python<'_>) -> bool {
    let info = || -> PyResult<bool> {
        let modules = py.import("sys")?.getattr("modules")?;
        let data = modules.call_method1("get", ("torch.utils.data",))?;
        Ok(!data.is_none() && !data.call_method0("get_worker_info")?.is_none())
    };
    // An error: torch is being imported.
    info().unwrap_or(false)
}

/// The metric of this name and exponent.
pub(crate) fn metric(name: &str, p: Option<f64>) -> PyResult<Metric> {
    Metric::parse(name, p).into_py()
}

/// The arguments that give the reference row of each query.
pub(crate) struct SelfRows {
    exclude_self: bool,
    first_query: usize,
    rows: Option<Vec<u32>>,
}

impl SelfRows {
    /// With `exclude_self`, query `i` is row `first_query + i` (0 by default), or row `self_rows[i]` if that is given.
    pub(crate) fn new(
        exclude_self: bool,
        first_query: Option<&Bound<'_, PyAny>>,
        self_rows: Option<&Bound<'_, PyUntypedArray>>,
    ) -> PyResult<Self> {
        let first_query = first_query.map_or(Ok(0), |first| count("first_query", first))?;
        let Some(self_rows) = self_rows else { return Ok(Self { exclude_self, first_query, rows: None }) };
        let given = borrow_integers(self_rows, "self_rows")?;
        let row = |(at, row): (usize, &i64)| {
            u32::try_from(*row).map_err(|_| {
                PyValueError::new_err(format!("self_rows must name rows of the reference, got {row} at position {at}"))
            })
        };
        let rows = integers(&given, "self_rows")?.iter().enumerate().map(row).collect::<PyResult<_>>()?;
        Ok(Self { exclude_self, first_query, rows: Some(rows) })
    }

    /// The rule for the core.
    pub(crate) fn rule(&self) -> SelfRule<'_> {
        match &self.rows {
            _ if !self.exclude_self => SelfRule::None,
            Some(rows) => SelfRule::Rows(rows),
            None => SelfRule::From(self.first_query),
        }
    }
}

/// With `exclude_self`, query `i` is reference row `first_query + i` (0 by default).
pub(crate) fn self_rule(exclude_self: bool, first_query: Option<&Bound<'_, PyAny>>) -> PyResult<SelfRule<'static>> {
    let first = first_query.map_or(Ok(0), |first| count("first_query", first))?;
    Ok(if exclude_self { SelfRule::From(first) } else { SelfRule::None })
}
