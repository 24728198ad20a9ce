//! `_core.radius`: arguments in, CSR out.

use exactknn_core::{Argument, Metric, RadiusOptions, RadiusSearch, RowOrder, SelfRule, Within, active_level};
use numpy::{IntoPyArray, PyUntypedArray};
use pyo3::prelude::*;

use crate::Threads;
use crate::args::{self, SelfRows, count, threads, with_element};
use crate::array::{Stored, borrow, common_kind, matrix};
use crate::error::IntoPy;
use crate::interrupt;
use crate::references::References;

/// The arguments of a search by radius, for any element type.
#[derive(Clone, Copy)]
pub(crate) struct Call<'a> {
    pub(crate) radius: f64,
    pub(crate) exclude: SelfRule<'a>,
    /// The first reference row that is searched.
    pub(crate) from_row: usize,
    pub(crate) distances: bool,
    pub(crate) sort: bool,
    pub(crate) threads: Threads,
}

impl<'a> Call<'a> {
    /// The options for the core.
    pub(crate) fn options(&self, metric: Metric) -> PyResult<RadiusOptions<'a>> {
        let Self { radius, exclude, from_row, distances: values, sort, threads } = *self;
        let order = if sort { RowOrder::Value } else { RowOrder::Row };
        let simd = active_level().into_py()?;
        Ok(RadiusOptions { radius, metric, exclude, values, from_row, order, simd, threads })
    }
}

/// Row pointer, reference rows and, if requested, distances.
pub(crate) type Answer = (Py<PyAny>, Py<PyAny>, Option<Py<PyAny>>);

/// The reference rows within a radius of each query row.
#[pyfunction]
#[pyo3(signature = (
    query, reference, r, metric, *, exclude_self=false, first_query=None, self_rows=None, from_row=None, return_distances=true, sort=true,
    bfloat16=false, num_threads=None, progress=None, p=None
))]
#[pyo3(name = "radius")]
#[expect(clippy::too_many_arguments, reason = "the signature of the Python function")]
pub(crate) fn py_radius<'py>(
    query: &Bound<'py, PyUntypedArray>,
    reference: Option<&Bound<'py, PyUntypedArray>>,
    r: f64,
    metric: &str,
    exclude_self: bool,
    first_query: Option<&Bound<'_, PyAny>>,
    self_rows: Option<&Bound<'_, PyUntypedArray>>,
    from_row: Option<&Bound<'_, PyAny>>,
    return_distances: bool,
    sort: bool,
    bfloat16: bool,
    num_threads: Option<&Bound<'_, PyAny>>,
    progress: Option<&Bound<'_, PyAny>>,
    p: Option<f64>,
) -> PyResult<Answer> {
    let own = SelfRows::new(exclude_self, first_query, self_rows)?;
    let call = Call {
        radius: r,
        exclude: own.rule(),
        from_row: from_row.map_or(Ok(0), |row| count("from_row", row))?,
        distances: return_distances,
        sort,
        threads: threads(num_threads)?,
    };
    let references = References::one_shot(reference.unwrap_or(query), args::metric(metric, p)?);
    let kind = common_kind(query, references.rows, bfloat16)?;
    with_element!(kind, E => radius::<E>(query, references, call, progress))
}

/// The rows of `references` within a radius.
pub(crate) fn radius<E: Stored>(
    query: &Bound<'_, PyUntypedArray>,
    references: References<'_, '_>,
    call: Call<'_>,
    progress: Option<&Bound<'_, PyAny>>,
) -> PyResult<Answer>
where
    E::Output: numpy::Element,
{
    let py = query.py();
    let query = borrow::<E>(query, Argument::Query)?;
    let reference = borrow::<E>(references.rows, Argument::Reference)?;
    let (query, reference) = (matrix::<E>(&query, Argument::Query)?, references.matrix::<E>(&reference)?);
    let search = RadiusSearch::new(query, reference, call.options(references.metric)?).into_py()?;
    let found = interrupt::search(py, call.threads, || search.is_small(), progress, |monitor| search.run(monitor))?;
    Ok(answer(py, found, call.distances))
}

/// Compressed rows as arrays.
pub(crate) fn answer<T: numpy::Element>(
    py: Python<'_>,
    Within { starts, rows, values }: Within<T>,
    distances: bool,
) -> Answer {
    (
        starts.into_pyarray(py).into_any().unbind(),
        rows.into_pyarray(py).into_any().unbind(),
        distances.then(|| values.into_pyarray(py).into_any().unbind()),
    )
}
