//! The contract of a microkernel, in full.
//!
//! ```text
//! query panel      [step][MR] codes ─┐
//!                                    ├─ tile MR x NR of keys ── key >= bar? ──> CandidateLists
//! reference panels [step][NR] codes ─┘  run after run
//! ```
//!
//! A kernel multiplies one panel of `MR` query rows with a run of reference panels of `NR` rows each and reports which
//! *keys* might still matter. A code holds one column in float32, or four in 8-bit integers. The key of a pair is
//! `dot of the codes * scales - offset`, the larger the nearer; `bound.rs` says how far it can be
//! from the truth. The kernel knows nothing of metrics, rows left out, or top k. A second kind of filter (other codes,
//! another bound) is a second implementation of [`Kernel`]; the planner chooses.
//!
//! Edge rule: panels are always full. Missing reference rows are zero codes with an offset of infinity, so their key is
//! minus infinity; missing query rows are zero codes with a floor of infinity, so that they report (almost) nothing. A key or
//! a bar that is not a number is reported: what cannot be compared must be rescored. The caller drops pairs of missing rows.

use crate::arch::level::Simd;
use crate::saved::Stored;

/// The largest `MR` of any kernel.
pub(crate) const MAX_MR: usize = 16;

/// Reference panels in one run at most: bounds the memory of [`CandidateLists`].
pub(crate) const MAX_RUN: usize = 64;

/// A row, centred and scaled, with what the bound needs to know of it.
pub(crate) struct Centred<'a> {
    /// The row in float32; zeros if it cannot be filtered.
    pub(crate) row: &'a [f32],
    /// How far `row` may be from the exact centred, scaled row, in the 2-norm.
    pub(crate) row_error: f64,
    /// Norm of the exact centred, scaled row; infinite if the row cannot be filtered.
    pub(crate) norm: f64,
    /// Norm of the row before centring, scaled; 0 where the bound does not need it (Euclidean geometry).
    pub(crate) raw_norm: f64,
    /// What is subtracted from its dots (reference rows).
    pub(crate) offset: f64,
    /// An upper bound of the magnitudes that were added up to form `offset`.
    pub(crate) offset_size: f64,
    /// The error of `offset` beyond the noise of float64.
    pub(crate) offset_error: f64,
    /// See [`crate::exact::relative_error`].
    pub(crate) noise: f64,
}

/// A reference row's (or panel's) part of the error bound: see [`Thresholds`].
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(crate) struct PanelTerms {
    pub(crate) a: f32,
    pub(crate) b: f32,
    pub(crate) c: f32,
}

impl PanelTerms {
    pub(crate) fn max(self, other: Self) -> Self {
        Self { a: self.a.max(other.a), b: self.b.max(other.b), c: self.c.max(other.c) }
    }
}

/// What a kernel states of an encoded reference row.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct ReferenceTerms {
    pub(crate) error: PanelTerms,
    /// What one unit of its codes is worth.
    pub(crate) scale: f32,
}

/// What a kernel states of an encoded query row.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(crate) struct QueryTerms {
    /// Its part of the error bound.
    pub(crate) alpha: f32,
    pub(crate) beta: f32,
    /// What one unit of its codes is worth.
    pub(crate) scale: f32,
    /// What its integer products start from.
    pub(crate) bias: i32,
}

/// How rows become codes, and what that costs in the error bound. The kernels of all levels share it; only the widths of
/// their panels differ.
pub(crate) trait Encoding {
    /// One code of a row.
    type Code: Default + Stored;
    /// Columns that one code holds.
    const COLUMNS: usize;
    /// Whether the codes are so much coarser than float32 that reference rows may be centred in float32.
    const CENTER_F32: bool;

    /// Encode a centred reference row into lane `lane` of a panel of `lanes` rows.
    fn encode_reference(
        simd: Simd,
        row: &Centred<'_>,
        lane: usize,
        lanes: usize,
        panel: &mut [Self::Code],
    ) -> ReferenceTerms;

    /// Encode a centred query row into lane `lane` of a panel of `lanes` rows.
    fn encode_query(simd: Simd, row: &Centred<'_>, lane: usize, lanes: usize, panel: &mut [Self::Code]) -> QueryTerms;
}

/// The row itself in float32, for sums of products.
pub(crate) enum Float32 {}

/// Four columns a code, in 8-bit integers times a scale of the row.
pub(crate) enum Int8 {}

/// The row itself in float32, for a Minkowski distance. Chebyshev's (`MOST`) has terms of its own: a row is rounded in one
/// column at a time.
pub(crate) enum MinkowskiFloat32<const MOST: bool> {}

/// A filter microkernel. Implementations hold the token that proves their instruction set.
pub(crate) trait Kernel: Copy + Send + Sync {
    /// Rows of a query panel, at most [`MAX_MR`].
    const MR: usize;
    /// Rows of a reference panel.
    const NR: usize;
    /// Columns that one code holds.
    const COLUMNS: usize = <Self::Encoding as Encoding>::COLUMNS;
    /// One code of a row.
    type Code: Default + Stored;
    /// How the rows of its panels are encoded.
    type Encoding: Encoding<Code = Self::Code>;

    /// Report every pair whose key reaches its bar (see [`Thresholds`]).
    fn scan(self, query: &QueryPanel<'_, Self::Code>, run: &PanelRun<'_, Self::Code>, candidates: &mut CandidateLists);

    /// The same for tiles that serve both sides, where the kernel can.
    const SCAN_SYMMETRIC: Option<ScanSymmetric<Self>> = None;
}

/// Report every pair of rows that might be a neighbour of the other, either way: one whose key reaches its bar, or whose
/// key with the sides exchanged does (see [`Transposed`]).
pub(crate) type ScanSymmetric<K> = fn(
    K,
    &QueryPanel<'_, <K as Kernel>::Code>,
    &PanelRun<'_, <K as Kernel>::Code>,
    &Transposed<'_>,
    &mut CandidateLists,
);

/// What a tile needs to know so that its reference rows can be queries too, and its query rows references: the product is
/// the same, its error is the same, only the offset and the floor are those of the other side (`docs/exactness.md`,
/// "Symmetric tiles").
pub(crate) struct Transposed<'a> {
    /// The offset of query row `m` as a reference row.
    offset: [f32; MAX_MR],
    /// [`PanelTerms::c`] of query row `m` as a reference row; infinite if the row cannot be filtered.
    c: [f32; MAX_MR],
    /// `[panel of the run][NR]`: the floor of each reference row as a query.
    pub(crate) floors: &'a [f32],
}

impl<'a> Transposed<'a> {
    /// No query row is a reference row yet.
    pub(crate) fn closed(floors: &'a [f32]) -> Self {
        Self { offset: [f32::INFINITY; MAX_MR], c: [0.0; MAX_MR], floors }
    }

    /// Make query row `m` a reference row, of a panel with these terms.
    #[inline(always)]
    pub(crate) fn open(&mut self, m: usize, offset: f32, terms: PanelTerms) {
        self.offset[m] = offset;
        // The row's codes here are those of a query: that it could not be encoded as a reference shows in the terms alone.
        self.c[m] = if terms.a.is_finite() && terms.b.is_finite() { terms.c } else { f32::INFINITY };
    }

    /// Write the offset of each query row as a reference row, less the error of its keys with a panel: what is at least as
    /// near as the exact key stands for it.
    #[inline(always)]
    pub(super) fn against(&self, thresholds: &Thresholds, terms: PanelTerms, least_offsets: &mut [f32; MAX_MR]) {
        for m in 0..MAX_MR {
            let error = thresholds.alpha[m] * terms.a + thresholds.beta[m] * terms.b + self.c[m];
            least_offsets[m] = self.offset[m] - error;
        }
    }
}

/// `MR` query rows, interleaved.
pub(crate) struct QueryPanel<'a, C> {
    /// `[step][MR]`.
    pub(crate) codes: &'a [C],
    /// What the keys of each row are held against.
    pub(crate) thresholds: &'a Thresholds,
}

/// The bar of query row `m` against panel `p` is `floor[m] - (alpha[m] * a[p] + beta[m] * b[p] + c[p])`: keys below it
/// belong to rows that cannot be among the nearest.
#[derive(Debug, Clone)]
pub(crate) struct Thresholds {
    pub(crate) floor: [f32; MAX_MR],
    pub(crate) alpha: [f32; MAX_MR],
    pub(crate) beta: [f32; MAX_MR],
    /// [`QueryTerms::scale`] and [`QueryTerms::bias`] of each row.
    pub(crate) scale: [f32; MAX_MR],
    pub(crate) bias: [i32; MAX_MR],
    /// Rows from this one on are closed.
    pub(crate) rows: usize,
}

impl Thresholds {
    /// Thresholds that no key reaches.
    pub(crate) fn closed() -> Self {
        let zeros = [0.0; MAX_MR];
        Self { floor: [f32::INFINITY; MAX_MR], alpha: zeros, beta: zeros, scale: zeros, bias: [0; MAX_MR], rows: 0 }
    }

    /// Hold row `m` against `floor`.
    #[inline(always)]
    pub(crate) fn open(&mut self, m: usize, floor: f32, terms: QueryTerms) {
        self.floor[m] = floor;
        self.alpha[m] = terms.alpha;
        self.beta[m] = terms.beta;
        self.scale[m] = terms.scale;
        self.bias[m] = terms.bias;
        self.rows = self.rows.max(m + 1);
    }

    /// Write the thresholds of all rows against a panel.
    #[inline(always)]
    pub(crate) fn against(&self, terms: PanelTerms, thresholds: &mut [f32; MAX_MR]) {
        for m in 0..MAX_MR {
            thresholds[m] = self.floor[m] - (self.alpha[m] * terms.a + self.beta[m] * terms.b + terms.c);
        }
    }
}

/// Which panels of a range a run visits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Visit {
    All,
    /// Every [`SAMPLE_STRIDE`]-th panel.
    Sample,
    /// The panels that [`Visit::Sample`] leaves out.
    Rest,
}

/// One panel in this many belongs to the sample.
pub(crate) const SAMPLE_STRIDE: usize = 8;

impl Visit {
    #[inline(always)]
    pub(crate) fn leaves_out(self, panel: usize) -> bool {
        match self {
            Self::All => false,
            Self::Sample => !panel.is_multiple_of(SAMPLE_STRIDE),
            Self::Rest => panel.is_multiple_of(SAMPLE_STRIDE),
        }
    }
}

/// Reference panels, and which of them to scan: at most [`MAX_RUN`].
pub(crate) struct PanelRun<'a, C> {
    /// `[panel][step][NR]`, all panels.
    pub(crate) codes: &'a [C],
    /// `[panel][NR]`: subtracted from each dot.
    pub(crate) offsets: &'a [f32],
    /// `[panel][NR]`: see [`ReferenceTerms::scale`].
    pub(crate) scales: &'a [f32],
    /// One a panel.
    pub(crate) terms: &'a [PanelTerms],
    pub(crate) start: usize,
    pub(crate) end: usize,
    pub(crate) visit: Visit,
}

/// The pairs that a scan reported: one list for each query row of the panel.
pub(crate) struct CandidateLists {
    capacity: usize,
    len: [usize; MAX_MR],
    rows: Vec<u32>,
    keys: Vec<f32>,
}

impl CandidateLists {
    /// Lanes that [`CandidateLists::tail`] offers beyond the capacity of a list.
    pub(crate) const SLACK: usize = 16;

    /// Room for the longest run of a kernel with panels of `nr` rows.
    pub(crate) fn new(mr: usize, nr: usize) -> Self {
        let capacity = MAX_RUN * nr + Self::SLACK;
        Self { capacity, len: [0; MAX_MR], rows: vec![0; mr * capacity], keys: vec![0.0; mr * capacity] }
    }

    /// Report one pair.
    #[inline(always)]
    pub(crate) fn push(&mut self, m: usize, row: u32, key: f32) {
        let at = m * self.capacity + self.len[m];
        self.rows[at] = row;
        self.keys[at] = key;
        self.len[m] += 1;
    }

    /// Sixteen places behind the list of row `m`, to be filled and then counted with [`CandidateLists::grow`].
    #[inline(always)]
    #[cfg_attr(not(target_arch = "x86_64"), allow(dead_code))]
    pub(crate) fn tail(&mut self, m: usize) -> (&mut [u32], &mut [f32]) {
        let at = m * self.capacity + self.len[m];
        (&mut self.rows[at..at + Self::SLACK], &mut self.keys[at..at + Self::SLACK])
    }

    /// Count `count` pairs that were written to [`CandidateLists::tail`].
    #[inline(always)]
    #[cfg_attr(not(target_arch = "x86_64"), allow(dead_code))]
    pub(crate) fn grow(&mut self, m: usize, count: usize) {
        self.len[m] += count;
    }

    /// The rows reported for query row `m`.
    #[inline(always)]
    pub(crate) fn rows(&self, m: usize) -> &[u32] {
        let at = m * self.capacity;
        &self.rows[at..at + self.len[m]]
    }

    /// Rows and keys reported for query row `m`; the list is empty afterwards.
    #[inline(always)]
    pub(crate) fn take(&mut self, m: usize) -> (&[u32], &[f32]) {
        let (at, len) = (m * self.capacity, std::mem::take(&mut self.len[m]));
        (&self.rows[at..at + len], &self.keys[at..at + len])
    }
}
