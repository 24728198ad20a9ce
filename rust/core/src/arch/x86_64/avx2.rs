//! AVX2 and FMA: vectors of eight numbers, the float32 kernel, and sums over unpacked rows.
//!
//! ```text
//! Vector for Avx2 ──> generic::scan, with #[target_feature]          ──> Avx2F32
//!                 └─> generic::unpacked_sums, with #[target_feature] ──> unpacked_sums
//! ```
//!
//! The methods of the vector are `#[inline(always)]`, which a function with `#[target_feature]` cannot be; so they have no
//! features of their own, and the token makes their unsafe calls sound.

use std::arch::x86_64::*;

use crate::arch::generic::{self, Float32Products, Vector};
use crate::arch::kernel::{CandidateLists, Float32, Microkernel, PanelRun, QueryPanel};
use crate::arch::kernel::{UNPACKED_LANES, UNPACKED_ROWS, UnpackedSums};
use crate::arch::level::Avx2;

pub(super) const LANES: usize = 8;

impl Vector for Avx2 {
    type Floats = __m256;
    const LANES: usize = LANES;

    intrinsics! {
        fn splat(x: f32) -> __m256 = _mm256_set1_ps;
        fn sub(x: __m256, y: __m256) -> __m256 = _mm256_sub_ps;
        fn mul(x: __m256, y: __m256) -> __m256 = _mm256_mul_ps;
        fn mul_add(x: __m256, y: __m256, z: __m256) -> __m256 = _mm256_fmadd_ps;
        fn mul_sub(x: __m256, y: __m256, z: __m256) -> __m256 = _mm256_fmsub_ps;
        fn neg_mul_add(x: __m256, y: __m256, z: __m256) -> __m256 = _mm256_fnmadd_ps;
    }

    #[inline(always)]
    fn load(self, numbers: &[f32]) -> __m256 {
        let numbers: &[f32; LANES] = numbers.first_chunk().expect("a vector of numbers");
        // SAFETY: `self` proves AVX2, and `numbers` has LANES numbers; the load need not be aligned.
        unsafe { _mm256_loadu_ps(numbers.as_ptr()) }
    }

    #[inline(always)]
    fn store(self, x: __m256, numbers: &mut [f32]) {
        let numbers: &mut [f32; LANES] = numbers.first_chunk_mut().expect("room for a vector");
        // SAFETY: `self` proves AVX2, and `numbers` has room for LANES numbers; the store need not be aligned.
        unsafe { _mm256_storeu_ps(numbers.as_mut_ptr(), x) }
    }

    #[inline(always)]
    fn not_less(self, x: __m256, y: __m256) -> u32 {
        // NLT_UQ: "not less than, or unordered", true for NaN, and quiet.
        // SAFETY: `self` proves AVX2.
        unsafe { _mm256_movemask_ps(_mm256_cmp_ps::<_CMP_NLT_UQ>(x, y)) as u32 }
    }

    #[inline(always)]
    fn report(self, candidates: &mut CandidateLists, m: usize, first: u32, over: u32, keys: __m256) {
        // SAFETY: `self` proves AVX2.
        unsafe { report(candidates, m, first, over, keys) }
    }
}

/// See [`Vector::report`]. Not forced inline: it is called rarely.
#[inline]
#[target_feature(enable = "avx2")]
fn report(candidates: &mut CandidateLists, m: usize, first: u32, mut over: u32, keys: __m256) {
    // All lanes: before a query has a threshold, every lane is reported.
    if over == 0xff {
        let lanes = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
        let rows = _mm256_add_epi32(_mm256_set1_epi32(first as i32), lanes);
        let (row_tail, key_tail) = candidates.tail(m);
        let row_tail: &mut [u32; LANES] = row_tail.first_chunk_mut().expect("a vector of places");
        let key_tail: &mut [f32; LANES] = key_tail.first_chunk_mut().expect("a vector of places");
        // SAFETY: both tails have room for LANES numbers.
        unsafe {
            _mm256_storeu_si256(row_tail.as_mut_ptr().cast(), rows);
            _mm256_storeu_ps(key_tail.as_mut_ptr(), keys);
        }
        candidates.grow(m, LANES);
        return;
    }
    let mut stored = [0.0f32; LANES];
    // SAFETY: there is room for LANES numbers.
    unsafe { _mm256_storeu_ps(stored.as_mut_ptr(), keys) };
    // Bit by bit from the lowest lane, so that candidates ascend. AVX2 has no compressing move.
    while over != 0 {
        let lane = over.trailing_zeros();
        over &= over - 1;
        candidates.push(m, first + lane, stored[lane as usize]);
    }
}

/// The float32 kernel. A tile of 6 x 16 keys takes twelve of the sixteen registers as accumulators, two for the references
/// and one for the query. Twelve independent chains hide the latency of two fused multiply-adds per cycle.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Avx2F32(pub(crate) Avx2);

const MR: usize = 6;
const NR: usize = 2 * LANES;

impl Microkernel for Avx2F32 {
    const MR: usize = MR;
    const NR: usize = NR;
    type Code = f32;
    type Encoding = Float32;

    fn scan(self, query: &QueryPanel<'_, f32>, run: &PanelRun<'_, f32>, candidates: &mut CandidateLists) {
        // SAFETY: the token in `self` proves AVX2 and FMA.
        unsafe { scan(self.0, query, run, candidates) }
    }
}

#[target_feature(enable = "avx2,fma")]
fn scan(token: Avx2, query: &QueryPanel<'_, f32>, run: &PanelRun<'_, f32>, candidates: &mut CandidateLists) {
    generic::scan::<_, MR, NR, MR>(Float32Products(token), query, run, None, candidates);
}

/// See [`unpacked_sums`](crate::arch::unpacked_sums).
pub(in crate::arch) fn unpacked_sums<const PRODUCTS: bool>(
    token: Avx2,
    columns: &[[f32; UNPACKED_LANES]],
    rows: [&[f32]; UNPACKED_ROWS],
) -> UnpackedSums {
    #[target_feature(enable = "avx2,fma")]
    fn sums<const PRODUCTS: bool>(
        token: Avx2,
        columns: &[[f32; UNPACKED_LANES]],
        rows: [&[f32]; UNPACKED_ROWS],
    ) -> UnpackedSums {
        generic::unpacked_sums::<_, { UNPACKED_LANES / LANES }, UNPACKED_ROWS, PRODUCTS>(token, columns, rows)
    }
    // SAFETY: the token proves AVX2 and FMA.
    unsafe { sums::<PRODUCTS>(token, columns, rows) }
}
