//! The contract between panels, kernels and the search around them.
//!
//! ```text
//! query panel      [step][MR] codes ─┐
//!                                    ├─ tile of MR x NR keys ── key >= threshold? ──> CandidateLists
//! reference panels [step][NR] codes ─┘  one panel of the run after the other
//! ```
//!
//! A kernel multiplies one panel of `MR` query rows with a run of reference panels of `NR` rows each, and reports the pairs
//! whose *key* reaches its threshold. A code holds one column in float32, or four columns in 8-bit integers. The key of a
//! pair is `dot of the codes * scales - offset`; a larger key is nearer. `filter/bound.rs` states how far it can be from the
//! exact key. Metrics, exclusion and top k are up to the caller.
//!
//! [`Encoding`] is the format of the codes with its error terms, [`Microkernel`] the scan of one instruction set: a new kind
//! of filter is a new encoding, a new instruction set a new kernel.
//!
//! Edges: panels are always full, so that a kernel has no remainder loop. A missing reference row has codes of zero and an
//! offset of infinity, hence a key of minus infinity. A missing query row has codes of zero and a floor of infinity, so it
//! reports only NaN. A NaN key or threshold is reported: a comparison with NaN proves nothing, so the row must be rescored.
//! The caller drops pairs of missing rows.

use crate::arch::level::Simd;
use crate::error::Result;
use crate::runtime::alloc::try_zeroed;
use crate::saved::Stored;

/// Lanes for queries in every array of a kernel: at least its `MR`, and the sixteen lanes of unpacked rows.
pub(crate) const MAX_MR: usize = 16;

/// Lanes and rows of one call of [`unpacked_over`](crate::arch::unpacked_over): sixteen lanes are one AVX-512 vector, and
/// four rows share each load of it.
pub(crate) const UNPACKED_LANES: usize = MAX_MR;
pub(crate) const UNPACKED_ROWS: usize = 4;

/// Up to sixteen queries for unpacked rows. The fewer they are, the more columns of each fit into sixteen lanes.
pub(crate) struct UnpackedQueries {
    /// Lanes of a query, a power of two. Lane `l` belongs to query `l / width`.
    pub(crate) width: usize,
    /// `[step][UNPACKED_LANES]`: lane `l` has column `step width + l % width`, or 0 behind the last column.
    pub(crate) columns: Vec<[f32; UNPACKED_LANES]>,
    /// The threshold of lane `l` for a row of norm `n` is `fixed[l] + slope[l] n`; equal in the lanes of a query.
    pub(crate) fixed: [f32; UNPACKED_LANES],
    pub(crate) slope: [f32; UNPACKED_LANES],
    /// One bit per lane: the first lane of each query.
    pub(crate) first_lanes: u32,
}

/// Most reference panels in a run. It bounds [`CandidateLists`], which have room for every pair of a run, so that kernels
/// need not check for space.
pub(crate) const MAX_RUN: usize = 64;

/// A centred, scaled row, and the norms and errors that its error terms are computed from.
pub(crate) struct Centred<'a> {
    /// The row in float32; zeros if it cannot be filtered.
    pub(crate) row: &'a [f32],
    /// Upper bound of the 2-norm of the difference between `row` and the exact centred, scaled row.
    pub(crate) row_error: f64,
    /// Norm of the exact centred, scaled row; infinite if the row cannot be filtered.
    pub(crate) norm: f64,
    /// Norm of the scaled row before centring; 0 if the bound does not need it (Euclidean geometry).
    pub(crate) raw_norm: f64,
    /// Subtracted from the dots of a reference row.
    pub(crate) offset: f64,
    /// Upper bound of the sum of the magnitudes of the terms of `offset`.
    pub(crate) offset_size: f64,
    /// The error of `offset` beyond the noise of float64.
    pub(crate) offset_error: f64,
    /// Relative error of a sum over the columns in float64 (`exact::relative_error`).
    pub(crate) noise: f64,
}

/// The terms of a reference row in the error bound, or of a panel as the maximum over its rows; see [`Thresholds`] for the
/// formula. Per panel, one threshold serves a whole tile, and one huge row spoils the bound of its own panel only.
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

/// The numbers beside the codes of a reference row.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct ReferenceTerms {
    pub(crate) error: PanelTerms,
    /// The value of one unit of its codes.
    pub(crate) scale: f32,
}

/// The numbers beside the codes of a query row.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(crate) struct QueryTerms {
    /// Its terms in the error bound; see [`Thresholds`].
    pub(crate) alpha: f32,
    pub(crate) beta: f32,
    /// The value of one unit of its codes.
    pub(crate) scale: f32,
    /// Initial value of its integer sums.
    pub(crate) bias: i32,
}

/// The encoding of rows as codes, with their error terms. The kernels of all levels share the encodings; only the widths of
/// their panels differ.
pub(crate) trait Encoding {
    /// One code of a row.
    type Code: Default + Stored;
    /// Columns that one code holds.
    const COLUMNS: usize;
    /// Whether reference rows may be centred in float32: only if that error is small compared with the error of the codes.
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

/// Four columns per code, as 8-bit integers times a scale of the row. Those of a query are at most `QUERY` in magnitude: 127,
/// or [`NARROW`] where products are added in pairs of 16 bits. References have the same codes for both.
#[cfg_attr(not(target_arch = "x86_64"), allow(dead_code))]
pub(crate) enum Int8<const QUERY: u8> {}

/// The largest 8-bit integer.
pub(crate) const FULL: u8 = 127;

/// The largest 7-bit integer: two products of it and an unsigned byte fit in 16 bits.
#[cfg_attr(not(target_arch = "x86_64"), allow(dead_code))]
pub(crate) const NARROW: u8 = 63;

/// The row itself in float32, for an Lp distance. `CHEBYSHEV` has smaller error terms: the largest rounding of a column
/// instead of the sum over all columns.
pub(crate) enum MinkowskiFloat32<const CHEBYSHEV: bool> {}

/// A microkernel. It holds the token that proves its instruction set, so that [`Microkernel::scan`] is a safe function.
pub(crate) trait Microkernel: Copy + Send + Sync {
    /// Rows of a query panel, at most [`MAX_MR`].
    const MR: usize;
    /// Rows of a reference panel.
    const NR: usize;
    /// Columns that one code holds.
    const COLUMNS: usize = <Self::Encoding as Encoding>::COLUMNS;
    /// One code of a row.
    type Code: Default + Stored;
    /// The encoding of its panels.
    type Encoding: Encoding<Code = Self::Code>;

    /// Report every pair whose key reaches its threshold (see [`Thresholds`]).
    fn scan(self, query: &QueryPanel<'_, Self::Code>, run: &PanelRun<'_, Self::Code>, candidates: &mut CandidateLists);

    /// The scan for symmetric tiles, if the kernel has one.
    const SCAN_SYMMETRIC: Option<ScanSymmetric<Self>> = None;
}

/// A scan that reports a pair if either row may be a neighbour of the other: if its key reaches the threshold of the query
/// row, or its key with the sides exchanged reaches that of the reference row (see [`Transposed`]).
pub(crate) type ScanSymmetric<K> = fn(
    K,
    &QueryPanel<'_, <K as Microkernel>::Code>,
    &PanelRun<'_, <K as Microkernel>::Code>,
    &Transposed<'_>,
    &mut CandidateLists,
);

/// The other side of a symmetric tile: its reference rows as queries, its query rows as references. Products and their errors
/// are the same; only offsets and floors are those of the other side (`docs/exactness.md`, "Symmetric tiles").
pub(crate) struct Transposed<'a> {
    /// The offset of query row `m` as a reference row.
    offset: [f32; MAX_MR],
    /// [`PanelTerms::c`] of query row `m` as a reference row; infinite if the row could not be encoded as one.
    c: [f32; MAX_MR],
    /// `[panel of the run][NR]`: the floor of each reference row as a query, from the first panel of the run.
    pub(crate) floors: &'a [f32],
}

impl<'a> Transposed<'a> {
    /// Floors of the reference rows; all query rows closed: their offset of infinity reaches no floor.
    pub(crate) fn closed(floors: &'a [f32]) -> Self {
        Self { offset: [f32::INFINITY; MAX_MR], c: [0.0; MAX_MR], floors }
    }

    /// Open query row `m` as a reference row with this offset, of a panel with these terms.
    #[inline(always)]
    pub(crate) fn open(&mut self, m: usize, offset: f32, terms: PanelTerms) {
        self.offset[m] = offset;
        // The codes in the tile are those of the row as a query. Infinite terms show that it has none as a reference.
        self.c[m] = if terms.a.is_finite() && terms.b.is_finite() { terms.c } else { f32::INFINITY };
    }

    /// For each query row as a reference, its offset less the error of its keys with a panel (`-t` in `docs/exactness.md`).
    /// With it, `dot - offset` is at least the exact key and is compared with the floor itself.
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
    /// The thresholds of each row, before the terms of a panel.
    pub(crate) thresholds: &'a Thresholds,
}

/// The terms of the thresholds of a query panel. The threshold of query row `m` and panel `p` is
/// `floor[m] - (alpha[m] * a[p] + beta[m] * b[p] + c[p])`: the floor for exact keys, less the error of computed keys. A row
/// whose computed key is below it has an exact key below the floor and is rejected.
#[derive(Debug, Clone)]
pub(crate) struct Thresholds {
    pub(crate) floor: [f32; MAX_MR],
    pub(crate) alpha: [f32; MAX_MR],
    pub(crate) beta: [f32; MAX_MR],
    /// [`QueryTerms::scale`] and [`QueryTerms::bias`] of each row.
    pub(crate) scale: [f32; MAX_MR],
    pub(crate) bias: [i32; MAX_MR],
    /// One more than the last open row: a kernel may skip the rows after it.
    pub(crate) rows: usize,
}

impl Thresholds {
    /// All rows closed: no key reaches a threshold of infinity.
    pub(crate) fn closed() -> Self {
        let zeros = [0.0; MAX_MR];
        Self { floor: [f32::INFINITY; MAX_MR], alpha: zeros, beta: zeros, scale: zeros, bias: [0; MAX_MR], rows: 0 }
    }

    /// Open row `m` for keys that reach `floor`.
    #[inline(always)]
    pub(crate) fn open(&mut self, m: usize, floor: f32, terms: QueryTerms) {
        self.floor[m] = floor;
        self.alpha[m] = terms.alpha;
        self.beta[m] = terms.beta;
        self.scale[m] = terms.scale;
        self.bias[m] = terms.bias;
        self.rows = self.rows.max(m + 1);
    }

    /// Compute the thresholds of all rows for a panel.
    #[inline(always)]
    pub(crate) fn for_panel(&self, terms: PanelTerms, thresholds: &mut [f32; MAX_MR]) {
        for m in 0..MAX_MR {
            thresholds[m] = self.floor[m] - (self.alpha[m] * terms.a + self.beta[m] * terms.b + terms.c);
        }
    }
}

/// Which panels of a range are scanned.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Visit {
    All,
    /// Every [`SAMPLE_STRIDE`]-th panel.
    Sample,
    /// All panels but those of [`Visit::Sample`].
    Rest,
}

/// One panel in `SAMPLE_STRIDE` belongs to the sample.
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

/// Reference panels, and a range of them to scan, at most [`MAX_RUN`].
pub(crate) struct PanelRun<'a, C> {
    /// `[panel][step][NR]`, all panels.
    pub(crate) codes: &'a [C],
    /// `[panel][NR]`: subtracted from each dot.
    pub(crate) offsets: &'a [f32],
    /// `[panel][NR]`: see [`ReferenceTerms::scale`].
    pub(crate) scales: &'a [f32],
    /// One per panel.
    pub(crate) terms: &'a [PanelTerms],
    pub(crate) start: usize,
    pub(crate) end: usize,
    pub(crate) visit: Visit,
}

/// The purpose of the lists in [`crate::Error::OutOfMemory`].
const LISTS: &str = "the lists of candidates";

/// The candidates that a scan has reported: a list of reference rows with their keys for each row of the query panel.
pub(crate) struct CandidateLists {
    capacity: usize,
    len: [usize; MAX_MR],
    rows: Vec<u32>,
    keys: Vec<f32>,
}

impl CandidateLists {
    /// Length of [`CandidateLists::tail`]: the lanes of the widest vector, which is always stored completely.
    pub(crate) const SLACK: usize = 16;

    /// Lists with room for all rows of the longest run of panels of `nr` rows.
    pub(crate) fn new(mr: usize, nr: usize) -> Result<Self> {
        Self::of_rows(mr, MAX_RUN * nr)
    }

    /// Lists of `lanes` queries with room for `rows` rows each.
    pub(crate) fn of_rows(lanes: usize, rows: usize) -> Result<Self> {
        let capacity = rows + Self::SLACK;
        let (rows, keys) = (try_zeroed(lanes * capacity, LISTS)?, try_zeroed(lanes * capacity, LISTS)?);
        Ok(Self { capacity, len: [0; MAX_MR], rows, keys })
    }

    /// Rows and keys of query row `m`.
    #[inline(always)]
    pub(crate) fn list(&self, m: usize) -> (&[u32], &[f32]) {
        let range = m * self.capacity..m * self.capacity + self.len[m];
        (&self.rows[range.clone()], &self.keys[range])
    }

    /// Clear the list of query row `m`.
    #[inline(always)]
    pub(crate) fn clear(&mut self, m: usize) {
        self.len[m] = 0;
    }

    /// Keep the pairs of query row `m` whose row lies in `range` and is not `except`. The rows ascend, so a list of a whole
    /// run is cut by searches and moved at once.
    pub(crate) fn restrict(&mut self, m: usize, range: std::ops::Range<u32>, except: u32) {
        let start = m * self.capacity;
        let list = &self.rows[start..start + self.len[m]];
        let first = list.partition_point(|row| *row < range.start);
        let end = list.partition_point(|row| *row < range.end).max(first);
        let own = first + list[first..end].partition_point(|row| *row < except);
        let behind = if list[own..end].first() == Some(&except) { own + 1 } else { own };
        for (from, to) in [(first..own, 0), (behind..end, own - first)] {
            self.rows.copy_within(start + from.start..start + from.end, start + to);
            self.keys.copy_within(start + from.start..start + from.end, start + to);
        }
        self.len[m] = own - first + end - behind;
    }

    /// Add consecutive rows without keys to the list of query row `m`.
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

    /// The rows of query row `m`.
    #[inline(always)]
    pub(crate) fn rows(&self, m: usize) -> &[u32] {
        let at = m * self.capacity;
        &self.rows[at..at + self.len[m]]
    }

    /// Rows and keys of query row `m`. Clears the list.
    #[cfg(test)]
    pub(crate) fn take(&mut self, m: usize) -> (&[u32], &[f32]) {
        let (at, len) = (m * self.capacity, std::mem::take(&mut self.len[m]));
        (&self.rows[at..at + len], &self.keys[at..at + len])
    }
}
