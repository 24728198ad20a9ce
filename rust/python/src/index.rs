//! `_core.Index`: one class for the four element types.
//!
//! Queries have the type to which rows are widened: float64 for float64 rows, float32 for all others.

use std::path::PathBuf;

use exactknn_core::saved::{self, Saved};
use exactknn_core::{Argument, Element, Error, Index, Metric, Monitor, QueryRef, SelfRule, active_level, bf16, f16};
use numpy::{PyArray1, PyArrayMethods, PyReadonlyArray1, PyUntypedArray};
use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::prelude::*;

use crate::args::{self, count, self_rule, threads};
use crate::array::{Kind, Stored, borrow, kind, matrix};
use crate::error::IntoPy;
use crate::interrupt;
use crate::knn::Pair;
use crate::radius::Answer;
use crate::{Threads, knn, radius, ranks};

/// Up to this number of elements, rows are added on the calling thread.
const INLINE_NUMBERS: usize = 1 << 16;

/// References that are prepared once and searched many times.
#[pyclass(name = "Index", module = "exactknn._core", frozen)]
pub(crate) struct PyIndex(AnyIndex);

enum AnyIndex {
    F32(Index<f32>),
    F64(Index<f64>),
    F16(Index<f16>),
    Bf16(Index<bf16>),
}

/// Run `$body` with the index, and with `$element` as the type of its rows.
macro_rules! with_index {
    ($any:expr, $index:ident, $element:ident => $body:expr) => {
        match $any {
            AnyIndex::F32($index) => {
                type $element = f32;
                $body
            }
            AnyIndex::F64($index) => {
                type $element = f64;
                $body
            }
            AnyIndex::F16($index) => {
                type $element = f16;
                $body
            }
            AnyIndex::Bf16($index) => {
                type $element = bf16;
                $body
            }
        }
    };
}

impl AnyIndex {
    /// Call `make` with the type of this name.
    fn of(dtype: &str, make: impl FnOnce(Kind) -> exactknn_core::Result<Self>) -> Option<exactknn_core::Result<Self>> {
        let kind = [Kind::F32, Kind::F64, Kind::F16, Kind::Bf16].into_iter().find(|kind| kind.name() == dtype)?;
        Some(make(kind))
    }

    fn kind(&self) -> Kind {
        match self {
            Self::F32(_) => Kind::F32,
            Self::F64(_) => Kind::F64,
            Self::F16(_) => Kind::F16,
            Self::Bf16(_) => Kind::Bf16,
        }
    }
}

/// Refuse an array of another type than `wanted`.
fn check_kind(array: &Bound<'_, PyUntypedArray>, argument: Argument, bfloat16: bool, wanted: Kind) -> PyResult<()> {
    let given = kind(array, argument, bfloat16)?;
    if given == wanted {
        return Ok(());
    }
    let (wanted, given) = (wanted.name(), given.name());
    Err(PyTypeError::new_err(format!("{argument} must be {wanted} for this index, got {given}")))
}

fn add<E: Stored + saved::Stored>(
    py: Python<'_>,
    index: &Index<E>,
    rows: &Bound<'_, PyUntypedArray>,
    num_threads: Option<&Bound<'_, PyAny>>,
    progress: Option<&Bound<'_, PyAny>>,
) -> PyResult<()> {
    let threads = threads(num_threads)?;
    let simd = active_level().into_py()?;
    let rows = borrow::<E>(rows, Argument::Reference)?;
    let rows = matrix::<E>(&rows, Argument::Reference)?;
    let is_small = rows.rows().saturating_mul(rows.dim()) <= INLINE_NUMBERS;
    let used = if is_small { 1 } else { threads.get() };
    let addition =
        interrupt::run(py, threads, || is_small, progress, |monitor| index.prepare(rows, simd, used, monitor))?;
    // After the last call of `progress`, which may raise an exception: then nothing is added.
    py.detach(|| index.append(addition, simd)).into_py()
}

/// Borrow a query of the widened type.
macro_rules! wide_query {
    ($query:ident, $element:ident) => {
        let $query = borrow::<<$element as Element>::Wide>($query, Argument::Query)?;
        let $query = matrix::<<$element as Element>::Wide>(&$query, Argument::Query)?;
    };
}

fn knn<E, W>(
    index: &Index<E>,
    query: &Bound<'_, PyUntypedArray>,
    k: Option<usize>,
    exclude: SelfRule<'static>,
    threads: Threads,
    progress: Option<&Bound<'_, PyAny>>,
) -> PyResult<Pair>
where
    E: Element<Wide = W> + saved::Stored,
    E::Output: numpy::Element,
    W: Stored,
{
    let py = query.py();
    wide_query!(query, E);
    let snapshot = py.detach(|| index.snapshot());
    let k = k.unwrap_or_else(|| snapshot.rows().saturating_sub(usize::from(exclude != SelfRule::None)));
    let options = knn::Call { k, exclude, threads }.options(index.metric())?;
    let is_small = || snapshot.execution(query.rows(), k, options.simd, threads).is_inline();
    let work = |monitor: &Monitor| snapshot.search(QueryRef::Wide(query), options, monitor);
    let found = interrupt::search(py, threads, is_small, progress, work)?;
    knn::pair(py, found, query.rows(), k)
}

fn radius<E, W>(
    index: &Index<E>,
    query: &Bound<'_, PyUntypedArray>,
    call: radius::Call<'_>,
    progress: Option<&Bound<'_, PyAny>>,
) -> PyResult<Answer>
where
    E: Element<Wide = W> + saved::Stored,
    E::Output: numpy::Element,
    W: Stored,
{
    let py = query.py();
    wide_query!(query, E);
    let options = call.options(index.metric())?;
    let snapshot = py.detach(|| index.snapshot());
    let is_small = || snapshot.execution(query.rows(), 1, options.simd, call.threads).is_inline();
    let work = |monitor: &Monitor| snapshot.radius(QueryRef::Wide(query), options, monitor);
    let found = interrupt::search(py, call.threads, is_small, progress, work)?;
    Ok(radius::answer(py, found, call.distances))
}

fn ranks<E, W>(
    index: &Index<E>,
    query: &Bound<'_, PyUntypedArray>,
    call: ranks::Call<'_>,
    progress: Option<&Bound<'_, PyAny>>,
) -> PyResult<ranks::Pair>
where
    E: Element<Wide = W> + saved::Stored,
    W: Stored,
{
    let py = query.py();
    wide_query!(query, E);
    let options = call.options(index.metric())?;
    let snapshot = py.detach(|| index.snapshot());
    let is_small = || snapshot.execution(query.rows(), 1, options.simd, call.threads).is_inline();
    let work = |monitor: &Monitor| snapshot.ranks(QueryRef::Wide(query), &call.groups, options, monitor);
    let found = interrupt::search(py, call.threads, is_small, progress, work)?;
    Ok(ranks::pair(py, found))
}

/// Whether rows are copied in less time than it takes to hand that to the pool.
fn is_small(rows: usize, dim: usize) -> bool {
    rows.saturating_mul(dim) <= 1 << 16
}

fn copy<E: Stored + saved::Stored>(
    py: Python<'_>,
    index: &Index<E>,
    start: usize,
    stop: Option<usize>,
) -> PyResult<Py<PyAny>> {
    let rows = py.detach(|| index.rows());
    let is_small = || is_small(stop.unwrap_or(rows).saturating_sub(start), index.dim());
    let numbers = interrupt::run(py, threads(None)?, is_small, None, |monitor| index.copy(start, stop, monitor))?;
    let shape = [numbers.len() / index.dim(), index.dim()];
    let rows = PyArray1::from_vec(py, E::into_storage(numbers)).reshape(shape)?;
    Ok(rows.into_any().unbind())
}

#[pymethods]
impl PyIndex {
    #[new]
    #[pyo3(signature = (dim, metric, dtype, *, p=None))]
    fn new(dim: &Bound<'_, PyAny>, metric: &str, dtype: &str, p: Option<f64>) -> PyResult<Self> {
        let dim = count("dim", dim)?;
        let metric = args::metric(metric, p)?;
        let index = AnyIndex::of(dtype, |kind| {
            Ok(match kind {
                Kind::F32 => AnyIndex::F32(Index::new(dim, metric)?),
                Kind::F64 => AnyIndex::F64(Index::new(dim, metric)?),
                Kind::F16 => AnyIndex::F16(Index::new(dim, metric)?),
                Kind::Bf16 => AnyIndex::Bf16(Index::new(dim, metric)?),
            })
        });
        let wanted = "dtype must be float32, float64, float16 or bfloat16";
        let index = index.ok_or_else(|| PyValueError::new_err(format!("{wanted}, got {dtype:?}")))?;
        Ok(Self(index.into_py()?))
    }

    /// Load an index from a file. Its rows and codes are mapped, or read to memory.
    #[staticmethod]
    #[pyo3(signature = (path, *, mmap=true))]
    fn load(py: Python<'_>, path: PathBuf, mmap: bool) -> PyResult<Self> {
        let index = interrupt::run(
            py,
            Threads::MIN,
            || mmap,
            None,
            |monitor: &Monitor| {
                let saved = if mmap { Saved::open(&path)? } else { Saved::read(&path, monitor)? };
                let dtype = saved.metadata().get("dtype").map_or("", String::as_str);
                let index = AnyIndex::of(dtype, |kind| {
                    Ok(match kind {
                        Kind::F32 => AnyIndex::F32(Index::load(&saved)?),
                        Kind::F64 => AnyIndex::F64(Index::load(&saved)?),
                        Kind::F16 => AnyIndex::F16(Index::load(&saved)?),
                        Kind::Bf16 => AnyIndex::Bf16(Index::load(&saved)?),
                    })
                });
                index.unwrap_or_else(|| {
                    let wanted = "rows of float32, float64, float16 or bfloat16".to_owned();
                    Err(Error::BadFile { path: path.clone(), wanted, found: format!("{dtype:?}") })
                })
            },
        )?;
        Ok(Self(index))
    }

    /// Number of rows.
    #[getter]
    fn rows(&self, py: Python<'_>) -> usize {
        py.detach(|| with_index!(&self.0, index, _E => index.rows()))
    }

    #[getter]
    fn dim(&self) -> usize {
        with_index!(&self.0, index, _E => index.dim())
    }

    #[getter]
    fn metric(&self) -> &'static str {
        with_index!(&self.0, index, _E => index.metric()).name()
    }

    /// The exponent of the metric, if it has one.
    #[getter]
    fn p(&self) -> Option<f64> {
        match with_index!(&self.0, index, _E => index.metric()) {
            Metric::Minkowski(p) => Some(p.get()),
            _ => None,
        }
    }

    #[getter]
    fn dtype(&self) -> &'static str {
        self.0.kind().name()
    }

    /// Bytes of memory of rows and panels; mapped rows and codes do not count.
    #[getter]
    fn nbytes(&self, py: Python<'_>) -> usize {
        py.detach(|| with_index!(&self.0, index, _E => index.bytes()))
    }

    /// Append rows of the type of the index.
    #[pyo3(signature = (reference, *, bfloat16=false, num_threads=None, progress=None))]
    fn add(
        &self,
        py: Python<'_>,
        reference: &Bound<'_, PyUntypedArray>,
        bfloat16: bool,
        num_threads: Option<&Bound<'_, PyAny>>,
        progress: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<()> {
        check_kind(reference, Argument::Reference, bfloat16, self.0.kind())?;
        with_index!(&self.0, index, _E => add(py, index, reference, num_threads, progress))
    }

    /// Remove the rows whose entry in `mask` is true.
    fn remove(&self, py: Python<'_>, mask: PyReadonlyArray1<'_, bool>) -> PyResult<()> {
        let mask = mask.as_slice().map_err(|_| PyValueError::new_err("mask must be C-contiguous"))?;
        let remove = |monitor: &Monitor| with_index!(&self.0, index, _E => index.remove(mask, monitor));
        interrupt::run(py, threads(None)?, || is_small(mask.len(), self.dim()), None, remove)
    }

    /// A copy of the rows `start` to `stop`, by default to the last; bfloat16 as bit patterns of type uint16.
    #[pyo3(signature = (start, stop=None))]
    fn copy(&self, py: Python<'_>, start: &Bound<'_, PyAny>, stop: Option<&Bound<'_, PyAny>>) -> PyResult<Py<PyAny>> {
        let (start, stop) = (count("start", start)?, stop.map(|stop| count("stop", stop)).transpose()?);
        with_index!(&self.0, index, _E => copy(py, index, start, stop))
    }

    /// Distances and indices of the k nearest rows of each query, or of all rows.
    #[pyo3(signature = (query, k, *, exclude_self=false, first_query=None, num_threads=None, progress=None))]
    fn search(
        &self,
        query: &Bound<'_, PyUntypedArray>,
        k: Option<&Bound<'_, PyAny>>,
        exclude_self: bool,
        first_query: Option<&Bound<'_, PyAny>>,
        num_threads: Option<&Bound<'_, PyAny>>,
        progress: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Pair> {
        check_kind(query, Argument::Query, false, self.0.kind().wide())?;
        let k = k.map(|k| count("k", k)).transpose()?;
        let (exclude, threads) = (self_rule(exclude_self, first_query)?, threads(num_threads)?);
        with_index!(&self.0, index, E => {
            knn::<E, <E as Element>::Wide>(index, query, k, exclude, threads, progress)
        })
    }

    /// All rows within a radius of each query, in CSR form.
    #[pyo3(signature = (
        query, r, *, exclude_self=false, first_query=None, return_distances=true, sort=true, num_threads=None, progress=None
    ))]
    #[expect(clippy::too_many_arguments, reason = "the signature of the Python function")]
    fn radius(
        &self,
        query: &Bound<'_, PyUntypedArray>,
        r: f64,
        exclude_self: bool,
        first_query: Option<&Bound<'_, PyAny>>,
        return_distances: bool,
        sort: bool,
        num_threads: Option<&Bound<'_, PyAny>>,
        progress: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Answer> {
        check_kind(query, Argument::Query, false, self.0.kind().wide())?;
        let call = radius::Call {
            radius: r,
            exclude: self_rule(exclude_self, first_query)?,
            from_row: 0,
            distances: return_distances,
            sort,
            threads: threads(num_threads)?,
        };
        with_index!(&self.0, index, E => radius::<E, <E as Element>::Wide>(index, query, call, progress))
    }

    /// The 1-based ranks of each query's target rows: row pointer and ranks.
    #[pyo3(signature = (
        query, *, query_group, group_offsets, group_rows, exclude_self=false, first_query=None, num_threads=None,
        progress=None
    ))]
    #[expect(clippy::too_many_arguments, reason = "the signature of the Python function")]
    fn ranks<'py>(
        &self,
        query: &Bound<'py, PyUntypedArray>,
        query_group: &Bound<'py, PyUntypedArray>,
        group_offsets: &Bound<'py, PyUntypedArray>,
        group_rows: &Bound<'py, PyUntypedArray>,
        exclude_self: bool,
        first_query: Option<&Bound<'_, PyAny>>,
        num_threads: Option<&Bound<'_, PyAny>>,
        progress: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<ranks::Pair> {
        check_kind(query, Argument::Query, false, self.0.kind().wide())?;
        let arrays = ranks::GroupArrays::borrow(query_group, group_offsets, group_rows)?;
        let call = ranks::Call {
            groups: arrays.groups()?,
            exclude: self_rule(exclude_self, first_query)?,
            threads: threads(num_threads)?,
        };
        with_index!(&self.0, index, E => ranks::<E, <E as Element>::Wide>(index, query, call, progress))
    }

    /// Write the index to a file, replacing an existing one.
    #[pyo3(signature = (path, *, num_threads=None, progress=None))]
    fn save(
        &self,
        py: Python<'_>,
        path: PathBuf,
        num_threads: Option<&Bound<'_, PyAny>>,
        progress: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<()> {
        let threads = threads(num_threads)?;
        let simd = active_level().into_py()?;
        let save =
            |monitor: &Monitor| with_index!(&self.0, index, _E => index.save(&path, simd, threads.get(), monitor));
        interrupt::run(py, threads, || false, progress, save)
    }
}
