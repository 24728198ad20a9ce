//! `_core.knn`: arguments in, arrays out.

use exactknn_core::{Argument, Metric, Neighbours, Options, Search, SelfRule, active_level};
use numpy::{IntoPyArray, PyArrayMethods, PyUntypedArray};
use pyo3::prelude::*;

use crate::Threads;
use crate::args::{self, SelfRows, count, threads, with_element};
use crate::array::{Stored, borrow, common_kind, matrix};
use crate::error::IntoPy;
use crate::interrupt;
use crate::references::References;

/// Distances and indices.
pub(crate) type Pair = (Py<PyAny>, Py<PyAny>);

/// The arguments of a search for the k nearest, for any element type.
#[derive(Clone, Copy)]
pub(crate) struct Call<'a> {
    pub(crate) k: usize,
    pub(crate) exclude: SelfRule<'a>,
    pub(crate) threads: Threads,
}

impl<'a> Call<'a> {
    /// The options for the core.
    pub(crate) fn options(&self, metric: Metric) -> PyResult<Options<'a>> {
        let Self { k, exclude, threads } = *self;
        Ok(Options { k, metric, exclude, simd: active_level().into_py()?, threads })
    }
}

/// The k nearest reference rows of each query row.
#[pyfunction]
#[pyo3(signature = (
    query, reference, k, metric, *, exclude_self=false, first_query=None, self_rows=None, bfloat16=false, num_threads=None, progress=None,
    p=None
))]
#[pyo3(name = "knn")]
#[expect(clippy::too_many_arguments, reason = "the signature of the Python function")]
pub(crate) fn py_knn<'py>(
    query: &Bound<'py, PyUntypedArray>,
    reference: Option<&Bound<'py, PyUntypedArray>>,
    k: &Bound<'_, PyAny>,
    metric: &str,
    exclude_self: bool,
    first_query: Option<&Bound<'_, PyAny>>,
    self_rows: Option<&Bound<'_, PyUntypedArray>>,
    bfloat16: bool,
    num_threads: Option<&Bound<'_, PyAny>>,
    progress: Option<&Bound<'_, PyAny>>,
    p: Option<f64>,
) -> PyResult<Pair> {
    let own = SelfRows::new(exclude_self, first_query, self_rows)?;
    let call = Call { k: count("k", k)?, exclude: own.rule(), threads: threads(num_threads)? };
    let references = References::one_shot(reference.unwrap_or(query), args::metric(metric, p)?);
    let kind = common_kind(query, references.rows, bfloat16)?;
    with_element!(kind, E => knn::<E>(query, references, call, progress))
}

/// The k nearest of `references`.
pub(crate) fn knn<E: Stored>(
    query: &Bound<'_, PyUntypedArray>,
    references: References<'_, '_>,
    call: Call<'_>,
    progress: Option<&Bound<'_, PyAny>>,
) -> PyResult<Pair>
where
    E::Output: numpy::Element,
{
    let py = query.py();
    let query = borrow::<E>(query, Argument::Query)?;
    let reference = borrow::<E>(references.rows, Argument::Reference)?;
    let (query, reference) = (matrix::<E>(&query, Argument::Query)?, references.matrix::<E>(&reference)?);
    let search = Search::new(query, reference, call.options(references.metric)?).into_py()?;
    let found = interrupt::search(py, call.threads, || search.is_small(), progress, |monitor| search.run(monitor))?;
    pair(py, found, query.rows(), call.k)
}

/// Neighbours as matrices with one row per query.
pub(crate) fn pair<T: numpy::Element>(
    py: Python<'_>,
    Neighbours { values, rows }: Neighbours<T>,
    queries: usize,
    k: usize,
) -> PyResult<Pair> {
    let shape = [queries, k];
    let values = values.into_pyarray(py).reshape(shape)?;
    let rows = rows.into_pyarray(py).reshape(shape)?;
    Ok((values.into_any().unbind(), rows.into_any().unbind()))
}
