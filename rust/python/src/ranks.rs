//! `_core.ranks`: arguments in, ranks as compressed rows out.

use exactknn_core::{Argument, Groups, Metric, RankOptions, RankSearch, Ranks, active_level, bf16, f16};
use numpy::{IntoPyArray, PyUntypedArray};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use crate::Threads;
use crate::array::{Kind, Stored, borrow, borrow_integers, common_kind, integers, matrix};
use crate::error::IntoPy;
use crate::interrupt;
use crate::search::{integer, positive_threads, threads_or_default};

/// The arguments of [`ranks`] that do not depend on the element type.
struct Call<'a> {
    metric: Metric,
    groups: Groups<'a>,
    exclude_self: bool,
    first_row: usize,
    num_threads: Option<Threads>,
}

/// The 1-based ranks of each query's target rows among all reference rows: row pointer and ranks.
#[pyfunction]
#[pyo3(signature = (
    query, reference, metric, *, query_group, group_offsets, group_rows, exclude_self=false, first_row=None,
    bfloat16=false, num_threads=None, progress=None, p=None
))]
#[expect(clippy::too_many_arguments, reason = "the signature of the Python function")]
pub(crate) fn ranks<'py>(
    query: &Bound<'py, PyUntypedArray>,
    reference: Option<&Bound<'py, PyUntypedArray>>,
    metric: &str,
    query_group: &Bound<'py, PyUntypedArray>,
    group_offsets: &Bound<'py, PyUntypedArray>,
    group_rows: &Bound<'py, PyUntypedArray>,
    exclude_self: bool,
    first_row: Option<&Bound<'py, PyAny>>,
    bfloat16: bool,
    num_threads: Option<&Bound<'py, PyAny>>,
    progress: Option<&Bound<'py, PyAny>>,
    p: Option<f64>,
) -> PyResult<(Py<PyAny>, Py<PyAny>)> {
    let py = query.py();
    let reference = reference.unwrap_or(query);
    let query_group = borrow_integers(query_group, "query_group")?;
    let group_offsets = borrow_integers(group_offsets, "group_offsets")?;
    let group_rows = borrow_integers(group_rows, "group_rows")?;
    let first_row = first_row.map_or(Ok(0), |first_row| integer("first_row", first_row))?;
    let call = Call {
        metric: Metric::parse(metric, p).into_py()?,
        groups: Groups {
            query_group: integers(&query_group, "query_group")?,
            offsets: integers(&group_offsets, "group_offsets")?,
            rows: integers(&group_rows, "group_rows")?,
        },
        exclude_self,
        first_row: usize::try_from(first_row)
            .map_err(|_| PyValueError::new_err(format!("first_row must be at least 0, got {first_row}")))?,
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
    call: &Call<'_>,
    progress: Option<&Bound<'py, PyAny>>,
) -> PyResult<(Py<PyAny>, Py<PyAny>)> {
    let query = borrow::<E>(query, Argument::Query)?;
    let reference = borrow::<E>(reference, Argument::Reference)?;
    let threads = threads_or_default(call.num_threads)?;
    let options = RankOptions {
        metric: call.metric,
        exclude_self: call.exclude_self,
        first_row: call.first_row,
        simd: active_level().into_py()?,
        threads,
    };
    let (query, reference) = (matrix::<E>(&query, Argument::Query)?, matrix::<E>(&reference, Argument::Reference)?);
    let search = RankSearch::new(query, reference, call.groups, options).into_py()?;
    let Ranks { starts, ranks } =
        interrupt::run(py, threads, || search.is_small(), progress, |monitor| search.run(monitor))?;
    Ok((starts.into_pyarray(py).into_any().unbind(), ranks.into_pyarray(py).into_any().unbind()))
}
