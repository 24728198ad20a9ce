//! AVX-512 F, BW, DQ and VL: vectors of sixteen numbers, the float32 kernel, and sums over unpacked rows.
//!
//! ```text
//! Vector for Avx512 ──> generic::scan, with #[target_feature]          ──> Avx512F32
//!                   └─> unpacked::over, with #[target_feature]          ──> unpacked_over
//! ```
//!
//! As in `avx2.rs`, the methods of the vector are inlined into functions with these features, and the token makes their
//! unsafe calls sound.

use std::arch::x86_64::*;

use crate::arch::generic::{self, Float32Products, Vector};
use crate::arch::kernel::{CandidateLists, Float32, Microkernel, PanelRun, QueryPanel};
use crate::arch::kernel::{UNPACKED_LANES, UNPACKED_ROWS, UnpackedQueries};
use crate::arch::level::Avx512;
use crate::arch::unpacked;

pub(super) const LANES: usize = 16;

impl Vector for Avx512 {
    type Floats = __m512;
    const LANES: usize = LANES;

    intrinsics! {
        fn splat(x: f32) -> __m512 = _mm512_set1_ps;
        fn add(x: __m512, y: __m512) -> __m512 = _mm512_add_ps;
        fn sub(x: __m512, y: __m512) -> __m512 = _mm512_sub_ps;
        fn mul(x: __m512, y: __m512) -> __m512 = _mm512_mul_ps;
        fn mul_add(x: __m512, y: __m512, z: __m512) -> __m512 = _mm512_fmadd_ps;
        fn mul_sub(x: __m512, y: __m512, z: __m512) -> __m512 = _mm512_fmsub_ps;
        fn neg_mul_add(x: __m512, y: __m512, z: __m512) -> __m512 = _mm512_fnmadd_ps;
    }

    #[inline(always)]
    fn load(self, numbers: &[f32]) -> __m512 {
        let numbers: &[f32; LANES] = numbers.first_chunk().expect("a vector of numbers");
        // SAFETY: `self` proves AVX-512 F, and `numbers` has LANES numbers; the load need not be aligned.
        unsafe { _mm512_loadu_ps(numbers.as_ptr()) }
    }

    #[inline(always)]
    fn repeat<const WIDTH: usize>(self, numbers: &[f32; WIDTH]) -> __m512 {
        // SAFETY: `self` proves AVX-512 F and DQ; each load reads the `WIDTH` numbers that it is chosen for, and need not be
        // aligned.
        unsafe {
            match WIDTH {
                1 => _mm512_set1_ps(numbers[0]),
                2 => _mm512_castpd_ps(_mm512_set1_pd(numbers.as_ptr().cast::<f64>().read_unaligned())),
                4 => _mm512_broadcast_f32x4(_mm_loadu_ps(numbers.as_ptr())),
                8 => _mm512_broadcast_f32x8(_mm256_loadu_ps(numbers.as_ptr())),
                _ => self.load(numbers),
            }
        }
    }

    #[inline(always)]
    fn sum_groups<const WIDTH: usize>(self, mut x: __m512) -> __m512 {
        // Each step adds the other half of a group of twice the size.
        // SAFETY: `self` proves AVX-512 F.
        unsafe {
            if WIDTH >= 2 {
                x = _mm512_add_ps(x, _mm512_permute_ps::<0b10_11_00_01>(x));
            }
            if WIDTH >= 4 {
                x = _mm512_add_ps(x, _mm512_permute_ps::<0b01_00_11_10>(x));
            }
            if WIDTH >= 8 {
                x = _mm512_add_ps(x, _mm512_shuffle_f32x4::<0b10_11_00_01>(x, x));
            }
            if WIDTH >= 16 {
                x = _mm512_add_ps(x, _mm512_shuffle_f32x4::<0b01_00_11_10>(x, x));
            }
        }
        x
    }

    #[inline(always)]
    fn not_less(self, x: __m512, y: __m512) -> u32 {
        // NLT_UQ: "not less than, or unordered", true for NaN, and quiet.
        // SAFETY: `self` proves AVX-512 F.
        unsafe { u32::from(_mm512_cmp_ps_mask::<_CMP_NLT_UQ>(x, y)) }
    }

    #[inline(always)]
    fn report(self, candidates: &mut CandidateLists, m: usize, first: u32, over: u32, keys: __m512) {
        // SAFETY: `self` proves AVX-512 F, BW, DQ and VL.
        unsafe { report(candidates, m, first, over, keys) }
    }
}

/// See [`Vector::report`]. Without a branch on the number of lanes: the list has room for a whole vector beyond its end.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
fn report(candidates: &mut CandidateLists, m: usize, first: u32, over: u32, keys: __m512) {
    let lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    let rows = _mm512_add_epi32(_mm512_set1_epi32(first as i32), lanes);
    let (row_tail, key_tail) = candidates.tail(m);
    let row_tail: &mut [u32; LANES] = row_tail.try_into().expect("a vector of places");
    let key_tail: &mut [f32; LANES] = key_tail.try_into().expect("a vector of places");
    let mask = over as __mmask16;
    // Compressed in a register and then stored completely: the compressing store is very slow on some CPUs (Zen 4).
    // SAFETY: both tails have room for LANES numbers.
    unsafe {
        _mm512_storeu_si512(row_tail.as_mut_ptr().cast(), _mm512_maskz_compress_epi32(mask, rows));
        _mm512_storeu_ps(key_tail.as_mut_ptr(), _mm512_maskz_compress_ps(mask, keys));
    }
    candidates.grow(m, over.count_ones() as usize);
}

/// The float32 kernel. A tile of 12 x 32 keys takes 24 of the 32 registers as accumulators, two for the references and one
/// for the query; the others are for thresholds, offsets and scales when keys are reported.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Avx512F32(pub(crate) Avx512);

const MR: usize = 12;
const NR: usize = 2 * LANES;

impl Microkernel for Avx512F32 {
    const MR: usize = MR;
    const NR: usize = NR;
    type Code = f32;
    type Encoding = Float32;

    fn scan(self, query: &QueryPanel<'_, f32>, run: &PanelRun<'_, f32>, candidates: &mut CandidateLists) {
        // SAFETY: the token in `self` proves AVX-512 F, BW, DQ and VL.
        unsafe { scan(self.0, query, run, candidates) }
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
fn scan(token: Avx512, query: &QueryPanel<'_, f32>, run: &PanelRun<'_, f32>, candidates: &mut CandidateLists) {
    generic::scan::<_, MR, NR, MR>(Float32Products(token), query, run, None, candidates);
}

/// See [`unpacked_over`](crate::arch::unpacked_over).
pub(in crate::arch) fn unpacked_over<const PRODUCTS: bool>(
    token: Avx512,
    queries: &UnpackedQueries,
    rows: [&[f32]; UNPACKED_ROWS],
    norms: [f32; UNPACKED_ROWS],
) -> [u32; UNPACKED_ROWS] {
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
    fn over<const PRODUCTS: bool>(
        token: Avx512,
        queries: &UnpackedQueries,
        rows: [&[f32]; UNPACKED_ROWS],
        norms: [f32; UNPACKED_ROWS],
    ) -> [u32; UNPACKED_ROWS] {
        const PARTS: usize = UNPACKED_LANES / LANES;
        unpacked::over::<_, PARTS, UNPACKED_ROWS, PRODUCTS>(token, queries, rows, norms)
    }
    // SAFETY: the token proves AVX-512 F, BW, DQ and VL.
    unsafe { over::<PRODUCTS>(token, queries, rows, norms) }
}
