//! `_core.BlockSearch`: references in blocks, one result.

use std::sync::{Mutex, MutexGuard, TryLockError};

use exactknn_core::{Argument, BlockSearch, Options, active_level};
use numpy::{IntoPyArray, PyArray2, PyArrayMethods, PyUntypedArray, PyUntypedArrayMethods};
use pyo3::exceptions::{PyRuntimeError, PyValueError};
use pyo3::prelude::*;

use crate::Threads;
use crate::args::{self, count, self_rule, threads, with_element};
use crate::array::{Kind, Stored, borrow, common_kind, kind, matrix};
use crate::error::IntoPy;
use crate::interrupt;
use crate::knn::{Pair, pair};

/// The k nearest neighbours of fixed queries among references that arrive in blocks.
#[pyclass(name = "BlockSearch", module = "exactknn._core", frozen)]
pub(crate) struct PyBlockSearch {
    query: Py<PyUntypedArray>,
    kind: Kind,
    bfloat16: bool,
    threads: Threads,
    k: usize,
    search: Mutex<BlockSearch<'static>>,
}

impl PyBlockSearch {
    /// The search, unless another thread is using it.
    fn search(&self) -> PyResult<MutexGuard<'_, BlockSearch<'static>>> {
        match self.search.try_lock() {
            Ok(search) => Ok(search),
            // A block is added completely or not at all, so a panic cannot have left the search inconsistent.
            Err(TryLockError::Poisoned(search)) => Ok(search.into_inner()),
            Err(TryLockError::WouldBlock) => {
                Err(PyRuntimeError::new_err("this BlockSearch is being used by another thread"))
            }
        }
    }

    fn add_as<E: Stored>(
        &self,
        py: Python<'_>,
        reference: &Bound<'_, PyUntypedArray>,
        progress: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<()> {
        let query = borrow::<E>(self.query.bind(py), Argument::Query)?;
        let reference = borrow::<E>(reference, Argument::Reference)?;
        let (query, reference) = (matrix::<E>(&query, Argument::Query)?, matrix::<E>(&reference, Argument::Reference)?);
        let mut search = self.search()?;
        let before = &*search;
        let is_small = || before.is_small::<E>(reference.rows());
        let after =
            interrupt::search(py, self.threads, is_small, progress, |monitor| before.with(query, reference, monitor))?;
        // After the last call of `progress`, which may raise an exception: then the block is not added.
        *search = after;
        Ok(())
    }

    fn result_as<E: Stored>(&self, py: Python<'_>, queries: usize) -> PyResult<Pair>
    where
        E::Output: numpy::Element,
    {
        let found = self.search()?.result::<E>().into_py()?;
        pair(py, found, queries, self.k)
    }

    fn queries(&self, py: Python<'_>) -> usize {
        self.query.bind(py).shape()[0]
    }
}

#[pymethods]
impl PyBlockSearch {
    #[new]
    #[pyo3(signature = (
        query, k, metric, *, exclude_self=false, first_query=None, bfloat16=false, num_threads=None, p=None
    ))]
    #[expect(clippy::too_many_arguments, reason = "the signature of the Python class")]
    fn new(
        query: &Bound<'_, PyUntypedArray>,
        k: &Bound<'_, PyAny>,
        metric: &str,
        exclude_self: bool,
        first_query: Option<&Bound<'_, PyAny>>,
        bfloat16: bool,
        num_threads: Option<&Bound<'_, PyAny>>,
        p: Option<f64>,
    ) -> PyResult<Self> {
        let k = count("k", k)?;
        let metric = args::metric(metric, p)?;
        let threads = threads(num_threads)?;
        let exclude = self_rule(exclude_self, first_query)?;
        let options = Options { k, metric, exclude, simd: active_level().into_py()?, threads };
        let kind = kind(query, Argument::Query, bfloat16)?;
        let search = with_element!(kind, E => {
            let query = borrow::<E>(query, Argument::Query)?;
            BlockSearch::new(matrix::<E>(&query, Argument::Query)?, options).into_py()?
        });
        Ok(Self { query: query.clone().unbind(), kind, bfloat16, threads, k, search: Mutex::new(search) })
    }

    /// References searched so far.
    #[getter]
    fn rows(&self) -> PyResult<usize> {
        Ok(self.search()?.rows())
    }

    /// Search one more block, whose row numbers continue those of the earlier blocks.
    #[pyo3(signature = (reference, *, progress=None))]
    fn add(
        &self,
        py: Python<'_>,
        reference: &Bound<'_, PyUntypedArray>,
        progress: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<()> {
        common_kind(self.query.bind(py), reference, self.bfloat16)?;
        with_element!(self.kind, E => self.add_as::<E>(py, reference, progress))
    }

    /// Distances and indices among all references so far.
    fn result(&self, py: Python<'_>) -> PyResult<Pair> {
        with_element!(self.kind, E => self.result_as::<E>(py, self.queries(py)))
    }

    /// A checkpoint for `restore`: the float64 ranks of the neighbours, and their rows.
    fn state(&self, py: Python<'_>) -> PyResult<Pair> {
        let (ranks, rows) = self.search()?.state().into_py()?;
        let shape = [self.queries(py), self.k];
        let ranks = ranks.into_pyarray(py).reshape(shape)?;
        let rows = rows.into_pyarray(py).reshape(shape)?;
        Ok((ranks.into_any().unbind(), rows.into_any().unbind()))
    }

    /// Continue from a checkpoint of `state` after `rows` references.
    fn restore(
        &self,
        ranks: &Bound<'_, PyAny>,
        indices: &Bound<'_, PyUntypedArray>,
        rows: &Bound<'_, PyAny>,
    ) -> PyResult<()> {
        let shape = [self.queries(ranks.py()), self.k];
        let ranks = ranks.cast::<PyArray2<f64>>()?;
        for (name, given) in [("ranks", ranks.as_untyped()), ("indices", indices)] {
            if given.shape() != shape || !given.is_c_contiguous() {
                let (wanted, given) = (format!("be C-contiguous of shape {shape:?}"), given.shape());
                return Err(PyValueError::new_err(format!("{name} must {wanted}, got shape {given:?}")));
            }
        }
        let ranks: Vec<f64> = ranks.to_vec()?;
        let indices: Vec<i64> = indices.cast::<PyArray2<i64>>()?.to_vec()?;
        self.search()?.restore(&ranks, &indices, count("rows", rows)?).into_py()
    }
}
