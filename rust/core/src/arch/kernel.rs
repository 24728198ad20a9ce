//! The contract between panels, kernels and the search around them.
//!
//! ```text
//! query panel      [step][MR] codes ─┐
//!                                    ├─ tile of MR x NR keys ── key >= threshold? ──> CandidateLists
//! reference panels [step][NR] codes ─┘  one panel of the run after the other
//! ```
//!
//! A kernel multiplies one panel of `MR` query rows with a run of reference panels of `NR` rows each, and reports the pairs
//! whose *key* reaches its threshold. A code holds one column in float32, or four columns in 8-bit integers. The key of a pair
//! is `dot of the codes * scales - offset`, the larger the nearer; `bound.rs` states how far it can be from the exact key.
//! Metrics, excluded rows and top k are the caller's business.
//!
//! [`Encoding`] is the format of the codes with its error terms, [`Microkernel`] the scan of one instruction set: a new kind of
//! filter is a new encoding, a new instruction set a new kernel.
//!
//! Edges: panels are always full. A missing reference row has codes of zero and an offset of infinity, so its key is minus
//! infinity. A missing query row has codes of zero and a floor of infinity, so it reports almost nothing. A key or a
//! threshold that is not a number is reported, since what cannot be compared must be rescored. The caller drops pairs of
//! missing rows.

use crate::arch::level::Simd;
use crate::saved::Stored;

/// The largest `MR` of any kernel.
pub(crate) const MAX_MR: usize = 16;

/// Queries and rows of one call of [`unpacked_sums`](crate::arch::unpacked_sums): sixteen queries are one vector of AVX-512, and four rows share each load
/// of it.
pub(crate) const UNPACKED_LANES: usize = MAX_MR;
pub(crate) const UNPACKED_ROWS: usize = 4;

/// `[row][query]`.
pub(crate) type UnpackedSums = [[f32; UNPACKED_LANES]; UNPACKED_ROWS];

/// The most reference panels in one run. It bounds [`CandidateLists`], which has room for every pair of a run.
pub(crate) const MAX_RUN: usize = 64;

/// A centred, scaled row, and what its error terms are computed from.
pub(crate) struct Centred<'a> {
    /// The row in float32; zeros if it cannot be filtered.
    pub(crate) row: &'a [f32],
    /// Distance of `row` from the exact centred, scaled row, in the 2-norm, at most.
    pub(crate) row_error: f64,
    /// Norm of the exact centred, scaled row; infinite if the row cannot be filtered.
    pub(crate) norm: f64,
    /// Norm of the row before centring, scaled; 0 where the bound does not need it (Euclidean geometry).
    pub(crate) raw_norm: f64,
    /// What is subtracted from the dots of a reference row.
    pub(crate) offset: f64,
    /// An upper bound of the sum of the magnitudes that `offset` was formed from.
    pub(crate) offset_size: f64,
    /// The error of `offset` beyond the noise of float64.
    pub(crate) offset_error: f64,
    /// Relative error of a sum over the columns in float64 (`exact::relative_error`).
    pub(crate) noise: f64,
}

/// The part of the error bound that belongs to a reference row, or to a panel as the largest of its rows; see [`Thresholds`]
/// for the formula.
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

/// What goes with the codes of a reference row.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct ReferenceTerms {
    pub(crate) error: PanelTerms,
    /// The value of one unit of its codes.
    pub(crate) scale: f32,
}

/// What goes with the codes of a query row.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(crate) struct QueryTerms {
    /// Its part of the error bound; see [`Thresholds`].
    pub(crate) alpha: f32,
    pub(crate) beta: f32,
    /// The value of one unit of its codes.
    pub(crate) scale: f32,
    /// Initial value of its integer sums.
    pub(crate) bias: i32,
}

/// How rows become codes, and the error terms that follow. The kernels of all levels share an encoding; only the widths of
/// their panels differ.
pub(crate) trait Encoding {
    /// One code of a row.
    type Code: Default + Stored;
    /// Columns that one code holds.
    const COLUMNS: usize;
    /// Whether reference rows may be centred in float32: its error must be small beside that of the codes.
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
#[cfg_attr(not(target_arch = "x86_64"), allow(dead_code))]
pub(crate) enum Int8 {}

/// The row itself in float32, for a Minkowski distance. With `CHEBYSHEV` for Chebyshev's, where the rounding of one column counts
/// and not the sum over all.
pub(crate) enum MinkowskiFloat32<const CHEBYSHEV: bool> {}

/// A filter microkernel. It holds the token that proves its instruction set, so that [`Microkernel::scan`] is safe.
pub(crate) trait Microkernel: Copy + Send + Sync {
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

    /// Report every pair whose key reaches its threshold (see [`Thresholds`]).
    fn scan(self, query: &QueryPanel<'_, Self::Code>, run: &PanelRun<'_, Self::Code>, candidates: &mut CandidateLists);

    /// The scan for symmetric tiles, if the kernel has one.
    const SCAN_SYMMETRIC: Option<ScanSymmetric<Self>> = None;
}

/// A scan that reports a pair if either row may be a neighbour of the other: if its key reaches its threshold, or its key with
/// the sides exchanged does (see [`Transposed`]).
pub(crate) type ScanSymmetric<K> = fn(
    K,
    &QueryPanel<'_, <K as Microkernel>::Code>,
    &PanelRun<'_, <K as Microkernel>::Code>,
    &Transposed<'_>,
    &mut CandidateLists,
);

/// The other side of a symmetric tile: its reference rows as queries, its query rows as references. The products and their
/// error are the same both ways; only the offset and the floor are those of the other side (`docs/exactness.md`, "Symmetric
/// tiles").
pub(crate) struct Transposed<'a> {
    /// The offset of query row `m` as a reference row.
    offset: [f32; MAX_MR],
    /// [`PanelTerms::c`] of query row `m` as a reference row; infinite if the row could not be encoded as one.
    c: [f32; MAX_MR],
    /// `[panel of the run][NR]`: the floor of each reference row as a query. Counted from the first panel of the run.
    pub(crate) floors: &'a [f32],
}

impl<'a> Transposed<'a> {
    /// Floors for the reference rows, and no query row that is a reference row.
    pub(crate) fn closed(floors: &'a [f32]) -> Self {
        Self { offset: [f32::INFINITY; MAX_MR], c: [0.0; MAX_MR], floors }
    }

    /// Make query row `m` a reference row with this offset, of a panel with these terms.
    #[inline(always)]
    pub(crate) fn open(&mut self, m: usize, offset: f32, terms: PanelTerms) {
        self.offset[m] = offset;
        // The tile has the row's codes as a query. Only the terms show that it could not be encoded as a reference.
        self.c[m] = if terms.a.is_finite() && terms.b.is_finite() { terms.c } else { f32::INFINITY };
    }

    /// For each query row as a reference: its offset less the error of its keys with a panel, so that `dot - offset` is not
    /// below the exact key and is compared with the floor itself. (`-t` in `docs/exactness.md`.)
    #[inline(always)]
    pub(super) fn for_panel(&self, thresholds: &Thresholds, terms: PanelTerms, least_offsets: &mut [f32; MAX_MR]) {
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
    /// What the keys of each row are compared with.
    pub(crate) thresholds: &'a Thresholds,
}

/// What thresholds are computed from. The threshold of query row `m` and panel `p` is
/// `floor[m] - (alpha[m] * a[p] + beta[m] * b[p] + c[p])`: the floor that exact keys must reach, less the error of computed
/// ones. A row with a key below it cannot be a result.
#[derive(Debug, Clone)]
pub(crate) struct Thresholds {
    pub(crate) floor: [f32; MAX_MR],
    pub(crate) alpha: [f32; MAX_MR],
    pub(crate) beta: [f32; MAX_MR],
    /// [`QueryTerms::scale`] and [`QueryTerms::bias`] of each row.
    pub(crate) scale: [f32; MAX_MR],
    pub(crate) bias: [i32; MAX_MR],
    /// One more than the last open row: a kernel may skip the rows behind.
    pub(crate) rows: usize,
}

impl Thresholds {
    /// All rows closed: no key reaches their thresholds.
    pub(crate) fn closed() -> Self {
        let zeros = [0.0; MAX_MR];
        Self { floor: [f32::INFINITY; MAX_MR], alpha: zeros, beta: zeros, scale: zeros, bias: [0; MAX_MR], rows: 0 }
    }

    /// Open row `m` for keys that may reach `floor`.
    #[inline(always)]
    pub(crate) fn open(&mut self, m: usize, floor: f32, terms: QueryTerms) {
        self.floor[m] = floor;
        self.alpha[m] = terms.alpha;
        self.beta[m] = terms.beta;
        self.scale[m] = terms.scale;
        self.bias[m] = terms.bias;
        self.rows = self.rows.max(m + 1);
    }

    /// Write the thresholds of all rows for a panel.
    #[inline(always)]
    pub(crate) fn for_panel(&self, terms: PanelTerms, thresholds: &mut [f32; MAX_MR]) {
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
    pub(crate) fn skips(self, panel: usize) -> bool {
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

/// The reference rows that a scan reported, with their keys: one list for each row of the query panel.
pub(crate) struct CandidateLists {
    capacity: usize,
    len: [usize; MAX_MR],
    rows: Vec<u32>,
    keys: Vec<f32>,
}

impl CandidateLists {
    /// Length of [`CandidateLists::tail`]: lanes of the widest vector, which is stored whole whatever it reports.
    pub(crate) const SLACK: usize = 16;

    /// Lists with room for all rows of the longest run of panels of `nr` rows.
    pub(crate) fn new(mr: usize, nr: usize) -> Self {
        let capacity = MAX_RUN * nr + Self::SLACK;
        Self { capacity, len: [0; MAX_MR], rows: vec![0; mr * capacity], keys: vec![0.0; mr * capacity] }
    }

    /// Lists of `lanes` queries that take up to `rows` rows each.
    pub(crate) fn of_rows(lanes: usize, rows: usize) -> Self {
        let capacity = rows + Self::SLACK;
        Self { capacity, len: [0; MAX_MR], rows: vec![0; lanes * capacity], keys: vec![0.0; lanes * capacity] }
    }

    /// Rows and keys reported for query row `m`.
    #[inline(always)]
    pub(crate) fn list(&self, m: usize) -> (&[u32], &[f32]) {
        let range = m * self.capacity..m * self.capacity + self.len[m];
        (&self.rows[range.clone()], &self.keys[range])
    }

    /// Empty the list of query row `m`.
    #[inline(always)]
    pub(crate) fn clear(&mut self, m: usize) {
        self.len[m] = 0;
    }

    /// Keep the pairs of query row `m` whose row passes, in their order.
    pub(crate) fn retain(&mut self, m: usize, keep: impl Fn(u32) -> bool) {
        let start = m * self.capacity;
        let mut kept = start;
        for at in start..start + self.len[m] {
            if keep(self.rows[at]) {
                (self.rows[kept], self.keys[kept]) = (self.rows[at], self.keys[at]);
                kept += 1;
            }
        }
        self.len[m] = kept - start;
    }

    /// Report a run of rows without keys.
    pub(crate) fn extend(&mut self, m: usize, rows: std::ops::Range<u32>) {
        let (at, count) = (m * self.capacity + self.len[m], rows.len());
        for (place, row) in self.rows[at..at + count].iter_mut().zip(rows) {
            *place = row;
        }
        self.len[m] += count;
    }

    /// Add one row to the list of query row `m`.
    #[inline(always)]
    pub(crate) fn push(&mut self, m: usize, row: u32, key: f32) {
        let at = m * self.capacity + self.len[m];
        self.rows[at] = row;
        self.keys[at] = key;
        self.len[m] += 1;
    }

    /// The [`CandidateLists::SLACK`] places after the list of query row `m`: write there, then [`CandidateLists::grow`].
    #[inline(always)]
    #[cfg_attr(not(target_arch = "x86_64"), allow(dead_code))]
    pub(crate) fn tail(&mut self, m: usize) -> (&mut [u32], &mut [f32]) {
        let at = m * self.capacity + self.len[m];
        (&mut self.rows[at..at + Self::SLACK], &mut self.keys[at..at + Self::SLACK])
    }

    /// Add the first `count` places of [`CandidateLists::tail`] to the list.
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

    /// Rows and keys of the list of query row `m`. Empties the list.
    #[cfg(test)]
    pub(crate) fn take(&mut self, m: usize) -> (&[u32], &[f32]) {
        let (at, len) = (m * self.capacity, std::mem::take(&mut self.len[m]));
        (&self.rows[at..at + len], &self.keys[at..at + len])
    }
}
