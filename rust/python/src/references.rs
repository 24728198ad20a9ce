//! `_core.References`: rows for many calls, with a cache of their panels, which the first call that needs them packs.

use exactknn_core::{Argument, Metric, PanelCache};
use numpy::{PyReadonlyArray2, PyUntypedArray, PyUntypedArrayMethods};
use pyo3::prelude::*;

use crate::args::{self, SelfRows, count, self_rule, threads, with_element};
use crate::array::{Kind, Stored, borrow, common_kind, kind, matrix};
use crate::{knn, radius, ranks};

/// The references of one call: rows, metric, and their panel cache, if there is one.
#[derive(Clone, Copy)]
pub(crate) struct References<'a, 'py> {
    pub(crate) rows: &'a Bound<'py, PyUntypedArray>,
    pub(crate) metric: Metric,
    cache: Option<&'a PanelCache>,
}

impl<'a, 'py> References<'a, 'py> {
    /// Rows that are searched once.
    pub(crate) fn one_shot(rows: &'a Bound<'py, PyUntypedArray>, metric: Metric) -> Self {
        Self { rows, metric, cache: None }
    }

    /// The references for the core; `borrowed` are the rows.
    pub(crate) fn matrix<'m, E: Stored>(
        &self,
        borrowed: &'m PyReadonlyArray2<'_, E::Storage>,
    ) -> PyResult<exactknn_core::References<'m, E>>
    where
        'a: 'm,
    {
        let rows = matrix::<E>(borrowed, Argument::Reference)?;
        Ok(match self.cache {
            Some(cache) => exactknn_core::References::cached(rows, cache),
            None => rows.into(),
        })
    }
}

/// References for many calls. The rows must not change as long as this object exists.
#[pyclass(name = "References", module = "exactknn._core", frozen)]
pub(crate) struct PyReferences {
    rows: Py<PyUntypedArray>,
    kind: Kind,
    bfloat16: bool,
    cache: PanelCache,
}

impl PyReferences {
    fn of<'a, 'py>(&'a self, rows: &'a Bound<'py, PyUntypedArray>) -> References<'a, 'py> {
        References { rows, metric: self.cache.metric(), cache: Some(&self.cache) }
    }

    /// The rows, or an error if the queries are of another type.
    fn rows<'a, 'py>(&'a self, query: &Bound<'py, PyUntypedArray>) -> PyResult<&'a Bound<'py, PyUntypedArray>> {
        let rows = self.rows.bind(query.py());
        common_kind(query, rows, self.bfloat16)?;
        Ok(rows)
    }
}

#[pymethods]
impl PyReferences {
    #[new]
    #[pyo3(signature = (reference, metric, *, bfloat16=false, p=None))]
    fn new(reference: &Bound<'_, PyUntypedArray>, metric: &str, bfloat16: bool, p: Option<f64>) -> PyResult<Self> {
        let cache = PanelCache::new(args::metric(metric, p)?);
        let kind = kind(reference, Argument::Reference, bfloat16)?;
        with_element!(kind, E => {
            // Refuse invalid rows here and not in the first search.
            matrix::<E>(&borrow::<E>(reference, Argument::Reference)?, Argument::Reference)?;
        });
        Ok(Self { rows: reference.clone().unbind(), kind, bfloat16, cache })
    }

    /// Number of rows.
    #[getter(rows)]
    fn count(&self, py: Python<'_>) -> usize {
        self.rows.bind(py).shape()[0]
    }

    /// How often the rows were packed: once per kernel that a search has used.
    #[getter]
    fn packings(&self) -> usize {
        self.cache.packings()
    }

    /// Distances and indices of the k nearest rows of each query.
    #[pyo3(signature = (
        query, k, *, exclude_self=false, first_query=None, self_rows=None, num_threads=None, progress=None
    ))]
    #[expect(clippy::too_many_arguments, reason = "the signature of the Python function")]
    fn knn(
        &self,
        query: &Bound<'_, PyUntypedArray>,
        k: &Bound<'_, PyAny>,
        exclude_self: bool,
        first_query: Option<&Bound<'_, PyAny>>,
        self_rows: Option<&Bound<'_, PyUntypedArray>>,
        num_threads: Option<&Bound<'_, PyAny>>,
        progress: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<knn::Pair> {
        let own = SelfRows::new(exclude_self, first_query, self_rows)?;
        let call = knn::Call { k: count("k", k)?, exclude: own.rule(), threads: threads(num_threads)? };
        let references = self.of(self.rows(query)?);
        with_element!(self.kind, E => knn::knn::<E>(query, references, call, progress))
    }

    /// All rows within a radius of each query, in CSR form.
    #[pyo3(signature = (
        query, r, *, exclude_self=false, first_query=None, self_rows=None, from_row=None, return_distances=true, sort=true,
        num_threads=None, progress=None
    ))]
    #[expect(clippy::too_many_arguments, reason = "the signature of the Python function")]
    fn radius(
        &self,
        query: &Bound<'_, PyUntypedArray>,
        r: f64,
        exclude_self: bool,
        first_query: Option<&Bound<'_, PyAny>>,
        self_rows: Option<&Bound<'_, PyUntypedArray>>,
        from_row: Option<&Bound<'_, PyAny>>,
        return_distances: bool,
        sort: bool,
        num_threads: Option<&Bound<'_, PyAny>>,
        progress: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<radius::Answer> {
        let own = SelfRows::new(exclude_self, first_query, self_rows)?;
        let call = radius::Call {
            radius: r,
            exclude: own.rule(),
            from_row: from_row.map_or(Ok(0), |row| count("from_row", row))?,
            distances: return_distances,
            sort,
            threads: threads(num_threads)?,
        };
        let references = self.of(self.rows(query)?);
        with_element!(self.kind, E => radius::radius::<E>(query, references, call, progress))
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
        let arrays = ranks::GroupArrays::borrow(query_group, group_offsets, group_rows)?;
        let call = ranks::Call {
            groups: arrays.groups()?,
            exclude: self_rule(exclude_self, first_query)?,
            threads: threads(num_threads)?,
        };
        let references = self.of(self.rows(query)?);
        with_element!(self.kind, E => ranks::ranks::<E>(query, references, call, progress))
    }
}
