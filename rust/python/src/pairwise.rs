//! `_core.pairwise`: arguments in, one value a pair out.

use exactknn_core::{Argument, Metric, Pairwise, PairwiseOptions, active_level};
use numpy::{IntoPyArray, PyUntypedArray};
use pyo3::prelude::*;

use crate::Threads;
use crate::args::{self, threads, with_element};
use crate::array::{Stored, borrow, common_kind, matrix};
use crate::error::IntoPy;
use crate::interrupt;

/// The values of the pairs (query row `i`, reference row `i`).
#[pyfunction]
#[pyo3(signature = (query, reference, metric, *, bfloat16=false, num_threads=None, p=None))]
pub(crate) fn pairwise<'py>(
    query: &Bound<'py, PyUntypedArray>,
    reference: &Bound<'py, PyUntypedArray>,
    metric: &str,
    bfloat16: bool,
    num_threads: Option<&Bound<'py, PyAny>>,
    p: Option<f64>,
) -> PyResult<Py<PyAny>> {
    let py = query.py();
    let (metric, threads) = (args::metric(metric, p)?, threads(num_threads)?);
    with_element!(common_kind(query, reference, bfloat16)?, E => run::<E>(py, query, reference, metric, threads))
}

fn run<'py, E: Stored>(
    py: Python<'py>,
    query: &Bound<'py, PyUntypedArray>,
    reference: &Bound<'py, PyUntypedArray>,
    metric: Metric,
    threads: Threads,
) -> PyResult<Py<PyAny>>
where
    E::Output: numpy::Element,
{
    let query = borrow::<E>(query, Argument::Query)?;
    let reference = borrow::<E>(reference, Argument::Reference)?;
    let options = PairwiseOptions { metric, simd: active_level().into_py()?, threads };
    let (query, reference) = (matrix::<E>(&query, Argument::Query)?, matrix::<E>(&reference, Argument::Reference)?);
    let pairs = Pairwise::new(query, reference, options).into_py()?;
    let values = interrupt::run(py, threads, || pairs.is_small(), None, |monitor| pairs.run(monitor))?;
    Ok(values.into_pyarray(py).into_any().unbind())
}
