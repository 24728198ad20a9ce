//! AVX2 and FMA: vectors of eight numbers, the float32 kernel, and sums over unpacked rows.
//!
//! ```text
//! Vector for Avx2 ──> generic::scan, with #[target_feature]          ──> Avx2F32
//!                 └─> unpacked::over, with #[target_feature]          ──> unpacked_over
//! ```
//!
//! The methods of the vector are `#[inline(always)]`, which a function with `#[target_feature]` cannot be; so they have no
//! features of their own, and the token makes their unsafe calls sound.

use std::arch::x86_64::*;

use crate::arch::generic::{self, Float32Products, Vector};
use crate::arch::kernel::{CandidateLists, Float32, Microkernel, PanelRun, QueryPanel};
use crate::arch::kernel::{UNPACKED_LANES, UNPACKED_ROWS, UnpackedQueries};
use crate::arch::level::Avx2;
use crate::arch::unpacked;

pub(super) const LANES: usize = 8;

impl Vector for Avx2 {
    type Floats = __m256;
    const LANES: usize = LANES;

    intrinsics! {
        fn splat(x: f32) -> __m256 = _mm256_set1_ps;
        fn add(x: __m256, y: __m256) -> __m256 = _mm256_add_ps;
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
    fn repeat<const WIDTH: usize>(self, numbers: &[f32; WIDTH]) -> __m256 {
        // SAFETY: `self` proves AVX2; each load reads the `WIDTH` numbers that it is chosen for, and need not be aligned.
        unsafe {
            match WIDTH {
                1 => _mm256_set1_ps(numbers[0]),
                2 => _mm256_castpd_ps(_mm256_set1_pd(numbers.as_ptr().cast::<f64>().read_unaligned())),
                4 => {
                    let four = _mm_loadu_ps(numbers.as_ptr());
                    _mm256_set_m128(four, four)
                }
                _ => self.load(numbers),
            }
        }
    }

    #[inline(always)]
    fn sum_groups<const WIDTH: usize>(self, mut x: __m256) -> __m256 {
        // Each step adds the other half of a group of twice the size.
        // SAFETY: `self` proves AVX2.
        unsafe {
            if WIDTH >= 2 {
                x = _mm256_add_ps(x, _mm256_permute_ps::<0b10_11_00_01>(x));
            }
            if WIDTH >= 4 {
                x = _mm256_add_ps(x, _mm256_permute_ps::<0b01_00_11_10>(x));
            }
            if WIDTH >= 8 {
                x = _mm256_add_ps(x, _mm256_permute2f128_ps::<1>(x, x));
            }
        }
        x
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

/// See [`unpacked_over`](crate::arch::unpacked_over).
pub(in crate::arch) fn unpacked_over<const PRODUCTS: bool>(
    token: Avx2,
    queries: &UnpackedQueries,
    rows: [&[f32]; UNPACKED_ROWS],
    norms: [f32; UNPACKED_ROWS],
) -> [u32; UNPACKED_ROWS] {
    #[target_feature(enable = "avx2,fma")]
    fn over<const PRODUCTS: bool>(
        token: Avx2,
        queries: &UnpackedQueries,
        rows: [&[f32]; UNPACKED_ROWS],
        norms: [f32; UNPACKED_ROWS],
    ) -> [u32; UNPACKED_ROWS] {
        const PARTS: usize = UNPACKED_LANES / LANES;
        unpacked::over::<_, PARTS, UNPACKED_ROWS, PRODUCTS>(token, queries, rows, norms)
    }
    // SAFETY: the token proves AVX2 and FMA.
    unsafe { over::<PRODUCTS>(token, queries, rows, norms) }
}
