//! References between searches: the rows, and the panels that are kept of them.
//!
//! ```text
//! scan through kernel K ──panels for K in the cache?──> the panels
//!                         ├── no, but stored in a file ──map──> cache ──> the panels
//!                         └── no ──Panels::make──> cache, if there is one ──> the panels
//! ```

use std::any::Any;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rayon::prelude::*;

use crate::arch::kernel::Microkernel;
use crate::arch::level::Simd;
use crate::error::{Argument, Error, Result};
use crate::exact::rows::Rows;
use crate::filter::frame::Frame;
use crate::filter::panels::{FirstBad, PackedReference};
use crate::filter::persist::codes_name;
use crate::matrix::{Element, MatrixRef, Precision};
use crate::metric::Metric;
use crate::runtime::Monitor;
use crate::saved::{Saved, Tensor};
use crate::search::plan;

/// Rows that are searched, and the panels kept of them between searches, if there are any.
///
/// ```
/// use exactknn_core::{Argument, MatrixRef, Metric, PanelCache, References};
///
/// let rows = [0.0f32, 1.0, 2.0, 3.0];
/// let rows = MatrixRef::new(&rows, 4, 1, Argument::Reference)?;
/// let once: References<'_, f32> = rows.into();
/// let cache = PanelCache::new(Metric::SqEuclidean);
/// let again = References::cached(rows, &cache); // for many searches: packed by the first that needs panels
/// # Ok::<(), exactknn_core::Error>(())
/// ```
#[derive(Clone, Copy)]
pub struct References<'a, E> {
    rows: MatrixRef<'a, E>,
    cache: Option<&'a PanelCache>,
}

impl<'a, E: Element> References<'a, E> {
    /// Rows whose panels `cache` keeps. The rows must not change while it does.
    pub fn cached(rows: MatrixRef<'a, E>, cache: &'a PanelCache) -> Self {
        Self { rows, cache: Some(cache) }
    }

    /// The rows.
    pub fn rows(&self) -> MatrixRef<'a, E> {
        self.rows
    }

    /// Whether panels are at hand, so that packing costs nothing.
    pub(crate) fn is_packed(&self) -> bool {
        self.cache.is_some_and(PanelCache::is_filled)
    }
}

impl<'a, E: Element> From<MatrixRef<'a, E>> for References<'a, E> {
    /// Rows that are searched once.
    fn from(rows: MatrixRef<'a, E>) -> Self {
        Self { rows, cache: None }
    }
}

impl<E: Element> References<'_, E> {
    /// The rows as a scan takes them.
    pub(crate) fn source(&self) -> Source<'_> {
        Source { rows: &self.rows, cache: self.cache, guard: None, finite: false, packed: self.is_packed() }
    }
}

/// Rows as a scan takes them, whatever their type and wherever they lie.
#[derive(Clone, Copy)]
pub(crate) struct Source<'a> {
    pub(crate) rows: &'a dyn Rows,
    /// Where panels are kept between searches; `None` if they are for one search.
    pub(crate) cache: Option<&'a PanelCache>,
    /// Verifies rows before they are read; `None` where all of them may be.
    pub(crate) guard: Option<&'a dyn Guard>,
    /// Whether all rows are known to be finite.
    pub(crate) finite: bool,
    /// Whether panels are at hand or kept from now on, so that packing costs a search nothing.
    pub(crate) packed: bool,
}

/// Verifies that rows may be read.
pub(crate) trait Guard: Sync {
    /// Called for every row before its first use, and again at every other: a second call must be quick.
    fn verify(&self, rows: Range<usize>) -> Result<()>;
}

impl<'a> Source<'a> {
    /// Rows that are searched once.
    pub(crate) fn one_shot(rows: &'a dyn Rows) -> Self {
        Self { rows, cache: None, guard: None, finite: false, packed: false }
    }

    /// Verify `rows` before they are read.
    #[inline(always)]
    pub(crate) fn verify(&self, rows: Range<usize>) -> Result<()> {
        self.guard.map_or(Ok(()), |guard| guard.verify(rows))
    }

    /// Verify these rows before they are read.
    #[inline(always)]
    pub(crate) fn verify_each(&self, rows: &[u32]) -> Result<()> {
        match self.guard {
            None => Ok(()),
            Some(guard) => rows.iter().try_for_each(|&row| guard.verify(row as usize..row as usize + 1)),
        }
    }

    /// Refuse rows that are not finite, where no packing does; a pass over them is cheap beside a search in float64.
    pub(crate) fn check_finite(&self, threads: usize, monitor: &Monitor) -> Result<()> {
        if self.finite {
            return Ok(());
        }
        let bad = FirstBad::new();
        self.each_piece(threads, monitor, |mut rows| {
            if let Some(row) = rows.find(|row| !self.rows.is_finite(*row)) {
                bad.report(row);
            }
        })?;
        bad.check(self.rows, Argument::Reference)
    }

    /// Do `work` for all rows, piece by piece, each once it has been verified.
    fn each_piece(&self, threads: usize, monitor: &Monitor, work: impl Fn(Range<usize>) + Sync) -> Result<()> {
        let rows = self.rows.rows();
        let step = plan::block_rows(self.rows.row_bytes());
        let piece = |number: usize| {
            monitor.check()?;
            let piece = number * step..((number + 1) * step).min(rows);
            self.verify(piece.clone())?;
            work(piece);
            Ok(())
        };
        let pieces = 0..rows.div_ceil(step);
        if threads == 1 { pieces.into_iter().try_for_each(piece) } else { pieces.into_par_iter().try_for_each(piece) }
    }

    /// The rows as kernel `K` reads them.
    pub(crate) fn panels<K: Microkernel + 'static>(
        &self,
        simd: Simd,
        metric: Metric,
        threads: usize,
        monitor: &Monitor,
    ) -> Result<Arc<Panels<K>>> {
        let make = || {
            if self.guard.is_some() {
                self.each_piece(threads, monitor, |_| ())?;
            }
            Panels::make(simd, metric, self.rows, threads, monitor)
        };
        match self.cache {
            Some(cache) => cache.panels(self.rows, metric, make),
            None => make().map(Arc::new),
        }
    }
}

/// References as kernel `K` reads them, and how they got there.
pub(crate) struct Panels<K: Microkernel> {
    pub(crate) frame: Frame,
    pub(crate) packed: PackedReference<K>,
}

impl<K: Microkernel> Panels<K> {
    fn make(simd: Simd, metric: Metric, rows: &dyn Rows, threads: usize, monitor: &Monitor) -> Result<Self> {
        let frame = Frame::choose(simd, metric, rows);
        let packed = PackedReference::pack(simd, &frame, rows, threads, monitor)?;
        Ok(Self { frame, packed })
    }
}

/// Panels of a kernel that is not named here.
pub(crate) trait AnyPanels: Any + Send + Sync {
    /// See [`codes_name`].
    fn codes_name(&self) -> String;
    /// Bytes of memory that they take.
    fn bytes(&self) -> usize;
    /// Bytes of their codes, wherever they lie.
    fn code_bytes(&self) -> usize;
    /// What a file has to hold to give them again; the names begin with `prefix`.
    fn tensors<'a>(&'a self, prefix: &str, tensors: &mut Vec<Tensor<'a>>);
}

impl<K: Microkernel + 'static> AnyPanels for Panels<K> {
    fn codes_name(&self) -> String {
        codes_name::<K>()
    }

    fn bytes(&self) -> usize {
        self.packed.bytes()
    }

    fn code_bytes(&self) -> usize {
        self.packed.code_bytes()
    }

    fn tensors<'a>(&'a self, prefix: &str, tensors: &mut Vec<Tensor<'a>>) {
        tensors.push(self.frame.tensor(prefix));
        self.packed.tensors(prefix, tensors);
    }
}

/// Panels in a file.
pub(crate) struct StoredPanels {
    pub(crate) saved: Saved,
    /// What the names of their tensors begin with.
    pub(crate) prefix: String,
    /// See [`codes_name`].
    pub(crate) codes_name: String,
}

/// The panels of one matrix and one metric: a form for each kernel that a search has used.
pub struct PanelCache {
    metric: Metric,
    forms: Mutex<Forms>,
    stored: Option<StoredPanels>,
}

#[derive(Default)]
struct Forms {
    /// [`Rows::identity`] of the rows that were packed.
    rows: Option<(usize, usize)>,
    panels: Vec<Arc<dyn AnyPanels>>,
}

impl Forms {
    fn find<K: Microkernel + 'static>(&self) -> Option<Arc<Panels<K>>> {
        self.panels.iter().find_map(|form| (Arc::clone(form) as Arc<dyn Any + Send + Sync>).downcast().ok())
    }
}

impl PanelCache {
    /// An empty cache for panels of `metric`.
    pub fn new(metric: Metric) -> Self {
        Self { metric, forms: Mutex::default(), stored: None }
    }

    /// Panels that stay in a file until a search needs them.
    pub(crate) fn stored(metric: Metric, stored: StoredPanels) -> Self {
        Self { stored: Some(stored), ..Self::new(metric) }
    }

    /// The metric that panels are for.
    pub fn metric(&self) -> Metric {
        self.metric
    }

    fn lock(&self) -> MutexGuard<'_, Forms> {
        // A panic elsewhere cannot have left the list half changed.
        self.forms.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether it holds panels.
    pub(crate) fn is_filled(&self) -> bool {
        self.stored.is_some() || !self.lock().panels.is_empty()
    }

    /// The panels for kernel `K`, which `make` makes where no search has used them before and no file holds them.
    fn panels<K: Microkernel + 'static>(
        &self,
        rows: &dyn Rows,
        metric: Metric,
        make: impl FnOnce() -> Result<Panels<K>>,
    ) -> Result<Arc<Panels<K>>> {
        if metric != self.metric {
            return Err(Error::Panic(format!("panels for {:?} were asked for {metric:?}", self.metric)));
        }
        let identity = Some(rows.identity());
        {
            let forms = self.lock();
            if let Some(panels) = forms.find() {
                // An index appends to its rows in place, but never once they are packed.
                return if forms.rows == identity {
                    Ok(panels)
                } else {
                    Err(Error::Panic("panels were asked for other rows than those that were packed".into()))
                };
            }
        }
        // Never under the lock: a worker that waits for others may take up a task that wants the same panels.
        let made = Arc::new(match &self.stored {
            Some(stored) if stored.codes_name == codes_name::<K>() => stored.read(rows, metric)?,
            _ => make()?,
        });
        let mut forms = self.lock();
        // Another search may have been first; then there is one form all the same.
        if let Some(panels) = forms.find() {
            return Ok(panels);
        }
        forms.rows = identity;
        forms.panels.push(Arc::clone(&made) as Arc<dyn AnyPanels>);
        Ok(made)
    }

    /// How many forms it holds: each was packed once.
    pub fn packings(&self) -> usize {
        self.lock().panels.len()
    }

    /// Bytes of memory that all forms take.
    pub fn bytes(&self) -> usize {
        self.lock().panels.iter().map(|form| form.bytes()).sum()
    }

    /// The form that takes the least in a file.
    pub(crate) fn smallest(&self) -> Option<Arc<dyn AnyPanels>> {
        self.lock().panels.iter().min_by_key(|form| form.code_bytes()).map(Arc::clone)
    }
}

impl StoredPanels {
    fn read<K: Microkernel>(&self, rows: &dyn Rows, metric: Metric) -> Result<Panels<K>> {
        let double = rows.precision() == Precision::Double;
        let frame = Frame::read(&self.saved, &self.prefix, metric, rows.dim(), double)?;
        let packed = PackedReference::read(&self.saved, &self.prefix, rows.rows(), rows.dim())?;
        Ok(Panels { frame, packed })
    }
}
