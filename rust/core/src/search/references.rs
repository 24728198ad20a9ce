//! References: their rows, and the cache of their panels between searches.
//!
//! ```text
//! scan with kernel K ──panels for K in the cache?──> the panels
//!                      ├── no, but stored in a file ──map──> cache ──> the panels
//!                      └── no ──Panels::make──> cache, if there is one ──> the panels
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
use crate::runtime::fork::Held;
use crate::saved::{Saved, Tensor};
use crate::search::plan;

/// Rows to search, with or without a cache of their panels.
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
    /// Rows whose panels are cached. The rows must not change as long as `cache` holds panels.
    pub fn cached(rows: MatrixRef<'a, E>, cache: &'a PanelCache) -> Self {
        Self { rows, cache: Some(cache) }
    }

    /// The rows.
    pub fn rows(&self) -> MatrixRef<'a, E> {
        self.rows
    }

    /// Whether panels are cached, so that a search need not pack.
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
    /// The rows, independent of their type.
    pub(crate) fn source(&self) -> Source<'_> {
        Source { rows: &self.rows, cache: self.cache, guard: None, finite: false, packed: self.is_packed() }
    }
}

/// References for a scan: rows of any type, in memory or mapped from a file.
#[derive(Clone, Copy)]
pub(crate) struct Source<'a> {
    pub(crate) rows: &'a dyn Rows,
    /// The cache of panels; `None` if they are used for one search only.
    pub(crate) cache: Option<&'a PanelCache>,
    /// Verifies rows before they are read; `None` if they are in memory.
    pub(crate) guard: Option<&'a dyn Guard>,
    /// Whether all rows are known to be finite.
    pub(crate) finite: bool,
    /// Whether panels are cached, or will be after this search, so that the plan ignores the cost of packing.
    pub(crate) packed: bool,
}

/// Verifies rows that are mapped from a file.
pub(crate) trait Guard: Sync {
    /// Called before every use of a row, so a call for verified rows must be fast.
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

    /// Refuse rows that are not finite, for searches that do not pack. This pass is cheap compared with a search in float64.
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

    /// Call `work` for all rows, piece by piece; each piece is verified first.
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

    /// The panels of kernel `K`, cached or packed now.
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

/// References packed for kernel `K`, and the frame in which they are encoded.
pub(crate) struct Panels<K: Microkernel> {
    pub(crate) frame: Frame,
    pub(crate) packed: PackedReference<K>,
}

impl<K: Microkernel> Panels<K> {
    fn make(simd: Simd, metric: Metric, rows: &dyn Rows, threads: usize, monitor: &Monitor) -> Result<Self> {
        let frame = Frame::choose(simd, metric, rows)?;
        let packed = PackedReference::pack(simd, &frame, rows, threads, monitor)?;
        Ok(Self { frame, packed })
    }
}

/// [`Panels`] of any kernel.
pub(crate) trait AnyPanels: Any + Send + Sync {
    /// See [`codes_name`].
    fn codes_name(&self) -> String;
    /// Bytes of memory.
    fn bytes(&self) -> usize;
    /// Bytes of their codes, in memory or mapped.
    fn code_bytes(&self) -> usize;
    /// Append the tensors that save these panels, named with `prefix`.
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

/// Panels stored in a file.
pub(crate) struct StoredPanels {
    pub(crate) saved: Saved,
    /// The prefix of their tensors' names.
    pub(crate) prefix: String,
    /// See [`codes_name`].
    pub(crate) codes_name: String,
}

/// The panels of one matrix for one metric, one form for each kernel that a search has used.
pub struct PanelCache {
    metric: Metric,
    forms: Mutex<Forms>,
    stored: Option<StoredPanels>,
}

#[derive(Default)]
struct Forms {
    /// [`Rows::identity`] of the rows that the cache is for: those of its first search.
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

    /// A cache whose panels are mapped from a file when a search needs them.
    pub(crate) fn stored(metric: Metric, stored: StoredPanels) -> Self {
        Self { stored: Some(stored), ..Self::new(metric) }
    }

    /// The metric of the panels.
    pub fn metric(&self) -> Metric {
        self.metric
    }

    fn lock(&self) -> Held<MutexGuard<'_, Forms>> {
        // The list is changed by single pushes, so a panic cannot have left it inconsistent.
        Held::new(|| self.forms.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Whether it holds panels.
    pub(crate) fn is_filled(&self) -> bool {
        self.stored.is_some() || !self.lock().panels.is_empty()
    }

    /// The panels for kernel `K`; `make` packs them if they are neither cached nor stored in a file.
    fn panels<K: Microkernel + 'static>(
        &self,
        rows: &dyn Rows,
        metric: Metric,
        make: impl FnOnce() -> Result<Panels<K>>,
    ) -> Result<Arc<Panels<K>>> {
        if metric != self.metric {
            return Err(Error::Panic(format!("a cache of panels for {:?} was used for {metric:?}", self.metric)));
        }
        {
            let mut forms = self.lock();
            // An index appends rows in place only to segments that are not packed, so packed rows do not move.
            if *forms.rows.get_or_insert(rows.identity()) != rows.identity() {
                return Err(Error::Panic("a cache of panels was used for other rows than those packed".into()));
            }
            if let Some(panels) = forms.find() {
                return Ok(panels);
            }
        }
        // Not under the lock: while a rayon worker waits for its subtasks it may run another search that needs the same
        // panels.
        let made = Arc::new(match &self.stored {
            Some(stored) if stored.codes_name == codes_name::<K>() => stored.read(rows, metric)?,
            _ => make()?,
        });
        let mut forms = self.lock();
        // If another search was faster, use its panels: one form per kernel.
        if let Some(panels) = forms.find() {
            return Ok(panels);
        }
        forms.panels.push(Arc::clone(&made) as Arc<dyn AnyPanels>);
        Ok(made)
    }

    /// The number of forms; each was packed, or mapped, once.
    pub fn packings(&self) -> usize {
        self.lock().panels.len()
    }

    /// Bytes of memory of all forms.
    pub fn bytes(&self) -> usize {
        self.lock().panels.iter().map(|form| form.bytes()).sum()
    }

    /// The form with the fewest bytes of codes, to be saved.
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
