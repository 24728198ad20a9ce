//! The tile loop, written once over the vectors of an instruction set.
//!
//! ```text
//! for each panel of a run
//!     accumulate   ROWS x 2 vectors of sums stay in registers over all steps
//!     report       sums ──scales, offsets──> keys; keys not less than their threshold ──> CandidateLists
//! ```
//!
//! A tile is two vectors wide: each broadcast of a query's code serves two multiply-adds, so loads are not the bottleneck. It
//! is as high as the registers allow, since its `2 ROWS` independent sums hide the latency of the multiply-adds.
//!
//! Keys are formed and compared while the sums are in registers: a matrix of keys is never written to memory.
//!
//! A kernel calls these functions from a function with `#[target_feature]`. They and all methods of the traits are
//! `#[inline(always)]`, and no closure has a vector operation: code that is not inlined into that function is compiled
//! without its instructions, and each operation becomes a call.

use crate::arch::kernel::{CandidateLists, MAX_MR, PanelRun, PanelTerms, QueryPanel, Thresholds, Transposed};

/// Vectors of float32 numbers. Implemented by the token that proves the instruction set, so the operations are safe.
pub(super) trait Vector: Copy {
    /// One vector.
    type Floats: Copy;
    /// Numbers in a vector.
    const LANES: usize;

    fn splat(self, x: f32) -> Self::Floats;

    /// The first [`Vector::LANES`] of `numbers`.
    fn load(self, numbers: &[f32]) -> Self::Floats;

    /// The first `WIDTH` numbers, a power of two, again and again in all lanes; [`Vector::load`] if there are more than lanes.
    fn repeat<const WIDTH: usize>(self, numbers: &[f32; WIDTH]) -> Self::Floats;

    /// In each lane the sum over its group of `WIDTH` lanes, a power of two; over all lanes if there are fewer.
    fn sum_groups<const WIDTH: usize>(self, x: Self::Floats) -> Self::Floats;

    fn add(self, x: Self::Floats, y: Self::Floats) -> Self::Floats;

    fn sub(self, x: Self::Floats, y: Self::Floats) -> Self::Floats;

    fn mul(self, x: Self::Floats, y: Self::Floats) -> Self::Floats;

    /// `x y + z`, rounded once where the instruction set can.
    fn mul_add(self, x: Self::Floats, y: Self::Floats, z: Self::Floats) -> Self::Floats;

    /// `x y - z`, as [`Vector::mul_add`].
    fn mul_sub(self, x: Self::Floats, y: Self::Floats, z: Self::Floats) -> Self::Floats;

    /// `z - x y`, as [`Vector::mul_add`].
    fn neg_mul_add(self, x: Self::Floats, y: Self::Floats, z: Self::Floats) -> Self::Floats;

    /// One bit per lane, set unless `x < y`. So it is set if either is NaN: such a key must be rescored.
    fn not_less(self, x: Self::Floats, y: Self::Floats) -> u32;

    /// Add the lanes of `keys` whose bit in `over` is set to the list of query row `m`, in ascending order. Lane 0 is
    /// reference row `first`.
    fn report(self, candidates: &mut CandidateLists, m: usize, first: u32, over: u32, keys: Self::Floats);
}

/// Sums of products of codes, of one vector of reference rows with one query row. Implemented by tokens, like [`Vector`].
pub(super) trait Products: Copy {
    type Vector: Vector;
    type Code: Copy;
    /// A vector of codes.
    type Codes: Copy;
    /// A vector of sums.
    type Sums: Copy;
    /// Whether sums must be multiplied by the rows' scales. If not, all scales are 1 and are not read.
    const SCALED: bool;

    fn vector(self) -> Self::Vector;

    /// Initial value of a query's sums, given its [`bias`](Thresholds::bias).
    fn start(self, bias: i32) -> Self::Sums;

    /// The codes of the first [`Vector::LANES`] reference rows of a step.
    fn load(self, codes: &[Self::Code]) -> Self::Codes;

    /// One query's code in every lane.
    fn splat(self, code: Self::Code) -> Self::Codes;

    fn add(self, sums: Self::Sums, reference: Self::Codes, query: Self::Codes) -> Self::Sums;

    fn to_floats(self, sums: Self::Sums) -> <Self::Vector as Vector>::Floats;
}

/// Products of float32 codes, for the vectors of any instruction set.
#[derive(Clone, Copy)]
pub(super) struct Float32Products<V>(pub(super) V);

impl<V: Vector> Products for Float32Products<V> {
    type Vector = V;
    type Code = f32;
    type Codes = V::Floats;
    type Sums = V::Floats;
    const SCALED: bool = false;

    #[inline(always)]
    fn vector(self) -> V {
        self.0
    }

    #[inline(always)]
    fn start(self, _: i32) -> V::Floats {
        self.0.splat(0.0)
    }

    #[inline(always)]
    fn load(self, codes: &[f32]) -> V::Floats {
        self.0.load(codes)
    }

    #[inline(always)]
    fn splat(self, code: f32) -> V::Floats {
        self.0.splat(code)
    }

    #[inline(always)]
    fn add(self, sums: V::Floats, reference: V::Floats, query: V::Floats) -> V::Floats {
        self.0.mul_add(query, reference, sums)
    }

    #[inline(always)]
    fn to_floats(self, sums: V::Floats) -> V::Floats {
        sums
    }
}

/// Two vectors of sums for each query row.
type Tile<P, const ROWS: usize> = [[<P as Products>::Sums; 2]; ROWS];

/// [`Microkernel::scan`](crate::arch::kernel::Microkernel::scan) for the first `ROWS` rows of a query panel; with
/// `transposed`, a [`ScanSymmetric`](crate::arch::kernel::ScanSymmetric).
#[inline(always)]
pub(super) fn scan<P: Products, const MR: usize, const NR: usize, const ROWS: usize>(
    products: P,
    query: &QueryPanel<'_, P::Code>,
    run: &PanelRun<'_, P::Code>,
    transposed: Option<&Transposed<'_>>,
    candidates: &mut CandidateLists,
) {
    const { assert!(NR == 2 * P::Vector::LANES && ROWS <= MR && MR <= MAX_MR) };
    let query_codes = query.codes.as_chunks::<MR>().0;
    let panel_len = query_codes.len() * NR;
    for p in run.start..run.end {
        if run.visit.skips(p) {
            continue;
        }
        let panel_codes = run.codes[p * panel_len..][..panel_len].as_chunks::<NR>().0;
        let tile = accumulate::<P, MR, NR, ROWS>(products, query_codes, panel_codes, &query.thresholds.bias);
        report::<P, NR, ROWS>(products, tile, query.thresholds, run, p, transposed, candidates);
    }
}

/// The sums of one panel. One loop over the steps: with `ROWS` and the tile's width known at compile time, the accumulators
/// stay in registers.
#[inline(always)]
fn accumulate<P: Products, const MR: usize, const NR: usize, const ROWS: usize>(
    products: P,
    query: &[[P::Code; MR]],
    panel: &[[P::Code; NR]],
    bias: &[i32; MAX_MR],
) -> Tile<P, ROWS> {
    let mut tile = [[products.start(0); 2]; ROWS];
    for m in 0..ROWS {
        tile[m] = [products.start(bias[m]); 2];
    }
    for (q, r) in query.iter().zip(panel) {
        let (r0, r1) = (products.load(r), products.load(&r[P::Vector::LANES..]));
        for m in 0..ROWS {
            let q = products.splat(q[m]);
            tile[m] = [products.add(tile[m][0], r0, q), products.add(tile[m][1], r1, q)];
        }
    }
    tile
}

/// Report the keys of panel `p` that reach their threshold, or, with `transposed`, the threshold of the other side. Once per
/// panel, so its cost is amortised over all columns.
#[inline(always)]
fn report<P: Products, const NR: usize, const ROWS: usize>(
    products: P,
    tile: Tile<P, ROWS>,
    thresholds: &Thresholds,
    run: &PanelRun<'_, P::Code>,
    p: usize,
    transposed: Option<&Transposed<'_>>,
    candidates: &mut CandidateLists,
) {
    let (vector, lanes) = (products.vector(), P::Vector::LANES);
    // The errors are the same for the whole panel: one threshold per query row.
    let terms: PanelTerms = run.terms[p];
    let (mut least_keys, mut least_offsets) = ([0.0; MAX_MR], [0.0; MAX_MR]);
    thresholds.for_panel(terms, &mut least_keys);
    if let Some(transposed) = transposed {
        transposed.for_panel(thresholds, terms, &mut least_offsets);
    }
    for half in 0..2 {
        let first = p * NR + half * lanes;
        let offsets = vector.load(&run.offsets[first..][..lanes]);
        let scales = if P::SCALED { vector.load(&run.scales[first..][..lanes]) } else { vector.splat(1.0) };
        let floors = match transposed {
            Some(transposed) => vector.load(&transposed.floors[first - run.start * NR..][..lanes]),
            None => vector.splat(f32::INFINITY),
        };
        for m in 0..ROWS {
            let sums = products.to_floats(tile[m][half]);
            let dots = if P::SCALED { vector.mul(sums, scales) } else { sums };
            let keys = keys_of(products, dots, thresholds.scale[m], offsets);
            let mut over = vector.not_less(keys, vector.splat(least_keys[m]));
            if transposed.is_some() {
                // The error is subtracted from the offset, one number per query row, instead of the floor, one per lane.
                let keys = keys_of(products, dots, thresholds.scale[m], vector.splat(least_offsets[m]));
                over |= vector.not_less(keys, floors);
            }
            // Rarely taken once a query has a threshold.
            if over != 0 {
                vector.report(candidates, m, first as u32, over, keys);
            }
        }
    }
}

/// `dots * scale - offsets`.
#[inline(always)]
fn keys_of<P: Products>(
    products: P,
    dots: <P::Vector as Vector>::Floats,
    scale: f32,
    offsets: <P::Vector as Vector>::Floats,
) -> <P::Vector as Vector>::Floats {
    let vector = products.vector();
    if P::SCALED { vector.mul_sub(dots, vector.splat(scale), offsets) } else { vector.sub(dots, offsets) }
}
