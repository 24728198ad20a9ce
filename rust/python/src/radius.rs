//! `_core.radius`: arguments in, compressed rows out.

use exactknn_core::{Argument, Metric, RadiusOptions, RadiusSearch, RowOrder, Within, active_level, bf16, f16};
use numpy::{IntoPyArray, PyUntypedArray};
use pyo3::prelude::*;

use crate::Threads;
use crate::array::{Kind, Stored, borrow, common_kind, matrix};
use crate::error::IntoPy;
use crate::interrupt;
use crate::search::{positive_threads, threads_or_default};

/// The arguments of [`radius`] that do not depend on the element type.
struct Call {
    radius: f64,
    metric: Metric,
    exclude_self: bool,
    distances: bool,
    sort: bool,
    num_threads: Option<Threads>,
}

/// Row pointer, reference rows and, when wanted, distances.
type Answer = (Py<PyAny>, Py<PyAny>, Option<Py<PyAny>>);

/// The reference rows within a radius of each query row.
#[pyfunction]
#[pyo3(signature = (
    query, reference, r, metric, *, exclude_self=false, return_distances=true, sort=true, bfloat16=false,
    num_threads=None, progress=None, p=None
))]
#[expect(clippy::too_many_arguments, reason = "the signature of the Python function")]
pub(crate) fn radius<'py>(
    query: &Bound<'py, PyUntypedArray>,
    reference: Option<&Bound<'py, PyUntypedArray>>,
    r: f64,
    metric: &str,
    exclude_self: bool,
    return_distances: bool,
    sort: bool,
    bfloat16: bool,
    num_threads: Option<&Bound<'py, PyAny>>,
    progress: Option<&Bound<'py, PyAny>>,
    p: Option<f64>,
) -> PyResult<Answer> {
    let py = query.py();
    let reference = reference.unwrap_or(query);
    let call = Call {
        radius: r,
        metric: Metric::parse(metric, p).into_py()?,
        exclude_self,
        distances: return_distances,
        sort,
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
) -> PyResult<Answer>
where
    E::Output: numpy::Element,
{
    let query = borrow::<E>(query, Argument::Query)?;
    let reference = borrow::<E>(reference, Argument::Reference)?;
    let threads = threads_or_default(call.num_threads)?;
    let options = RadiusOptions {
        radius: call.radius,
        metric: call.metric,
        exclude_self: call.exclude_self,
        values: call.distances,
        order: if call.sort { RowOrder::Value } else { RowOrder::Row },
        simd: active_level().into_py()?,
        threads,
    };
    let (query, reference) = (matrix::<E>(&query, Argument::Query)?, matrix::<E>(&reference, Argument::Reference)?);
    let search = RadiusSearch::new(query, reference, options).into_py()?;
    let Within { starts, rows, values } =
        interrupt::run(py, threads, || search.is_small(), progress, |monitor| search.run(monitor))?;
    Ok((
        starts.into_pyarray(py).into_any().unbind(),
        rows.into_pyarray(py).into_any().unbind(),
        call.distances.then(|| values.into_pyarray(py).into_any().unbind()),
    ))
}
