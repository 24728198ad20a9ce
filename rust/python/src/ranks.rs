//! `_core.ranks`: arguments in, ranks in CSR form out.

use exactknn_core::{Argument, Groups, Metric, RankOptions, RankSearch, Ranks, SelfRule, active_level};
use numpy::{IntoPyArray, PyReadonlyArray1, PyUntypedArray};
use pyo3::prelude::*;

use crate::Threads;
use crate::args::{self, self_rule, threads, with_element};
use crate::array::{Stored, borrow, borrow_integers, common_kind, integers, matrix};
use crate::error::IntoPy;
use crate::interrupt;
use crate::references::References;

/// The arguments of a search for ranks, for any element type.
#[derive(Clone, Copy)]
pub(crate) struct Call<'a> {
    pub(crate) groups: Groups<'a>,
    pub(crate) exclude: SelfRule<'static>,
    pub(crate) threads: Threads,
}

impl Call<'_> {
    /// The options for the core.
    pub(crate) fn options(&self, metric: Metric) -> PyResult<RankOptions<'static>> {
        Ok(RankOptions { metric, exclude: self.exclude, simd: active_level().into_py()?, threads: self.threads })
    }
}

/// The arrays of each query's target rows, borrowed.
pub(crate) struct GroupArrays<'py> {
    query_group: PyReadonlyArray1<'py, i64>,
    offsets: PyReadonlyArray1<'py, i64>,
    rows: PyReadonlyArray1<'py, i64>,
}

impl<'py> GroupArrays<'py> {
    pub(crate) fn borrow(
        query_group: &Bound<'py, PyUntypedArray>,
        offsets: &Bound<'py, PyUntypedArray>,
        rows: &Bound<'py, PyUntypedArray>,
    ) -> PyResult<Self> {
        Ok(Self {
            query_group: borrow_integers(query_group, "query_group")?,
            offsets: borrow_integers(offsets, "group_offsets")?,
            rows: borrow_integers(rows, "group_rows")?,
        })
    }

    pub(crate) fn groups(&self) -> PyResult<Groups<'_>> {
        Ok(Groups {
            query_group: integers(&self.query_group, "query_group")?,
            offsets: integers(&self.offsets, "group_offsets")?,
            rows: integers(&self.rows, "group_rows")?,
        })
    }
}

/// Row pointer and ranks.
pub(crate) type Pair = (Py<PyAny>, Py<PyAny>);

/// The 1-based ranks of each query's target rows among all reference rows: row pointer and ranks.
#[pyfunction]
#[pyo3(signature = (
    query, reference, metric, *, query_group, group_offsets, group_rows, exclude_self=false, first_query=None,
    bfloat16=false, num_threads=None, progress=None, p=None
))]
#[pyo3(name = "ranks")]
#[expect(clippy::too_many_arguments, reason = "the signature of the Python function")]
pub(crate) fn py_ranks<'py>(
    query: &Bound<'py, PyUntypedArray>,
    reference: Option<&Bound<'py, PyUntypedArray>>,
    metric: &str,
    query_group: &Bound<'py, PyUntypedArray>,
    group_offsets: &Bound<'py, PyUntypedArray>,
    group_rows: &Bound<'py, PyUntypedArray>,
    exclude_self: bool,
    first_query: Option<&Bound<'_, PyAny>>,
    bfloat16: bool,
    num_threads: Option<&Bound<'_, PyAny>>,
    progress: Option<&Bound<'_, PyAny>>,
    p: Option<f64>,
) -> PyResult<Pair> {
    let arrays = GroupArrays::borrow(query_group, group_offsets, group_rows)?;
    let call = Call {
        groups: arrays.groups()?,
        exclude: self_rule(exclude_self, first_query)?,
        threads: threads(num_threads)?,
    };
    let references = References::one_shot(reference.unwrap_or(query), args::metric(metric, p)?);
    let kind = common_kind(query, references.rows, bfloat16)?;
    with_element!(kind, E => ranks::<E>(query, references, call, progress))
}

/// The ranks of targets among `references`.
pub(crate) fn ranks<E: Stored>(
    query: &Bound<'_, PyUntypedArray>,
    references: References<'_, '_>,
    call: Call<'_>,
    progress: Option<&Bound<'_, PyAny>>,
) -> PyResult<Pair> {
    let py = query.py();
    let query = borrow::<E>(query, Argument::Query)?;
    let reference = borrow::<E>(references.rows, Argument::Reference)?;
    let (query, reference) = (matrix::<E>(&query, Argument::Query)?, references.matrix::<E>(&reference)?);
    let search = RankSearch::new(query, reference, call.groups, call.options(references.metric)?).into_py()?;
    let found = interrupt::search(py, call.threads, || search.is_small(), progress, |monitor| search.run(monitor))?;
    Ok(pair(py, found))
}

/// Ranks as arrays.
pub(crate) fn pair(py: Python<'_>, Ranks { starts, ranks }: Ranks) -> Pair {
    (starts.into_pyarray(py).into_any().unbind(), ranks.into_pyarray(py).into_any().unbind())
}
