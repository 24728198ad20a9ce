//! The int8 kernels of CPUs without an instruction for four products of bytes: AVX-512 and AVX2.
//!
//! ```text
//! 16-bit sums  = two products of an unsigned and a signed byte ── vpmaddubsw, which saturates
//! 32-bit sums += two of them                                    ── vpmaddwd by ones, vpaddd
//! start, end: as in `vnni`        reference codes + 128: unsigned        query codes: signed, at most 63
//! ```
//!
//! Queries have 7 bits, so that the 16-bit sums cannot saturate: `2 * 255 * 63 < 2^15`. All sums are then exact, as in
//! `vnni`. The coarser codes of the queries enlarge their residual, and the bound with it; it is measured, not assumed.
//!
//! Three instructions for each vector of codes are still half as many as the float32 kernel takes for its four vectors of
//! the same columns, and the codes take a quarter of the memory.

use std::arch::x86_64::*;

use super::{avx2, avx512};
use crate::arch::generic::{self, Products};
use crate::arch::kernel::{CandidateLists, FULL, Int8, Microkernel, NARROW, PanelRun, QueryPanel};
use crate::arch::level::{Avx2, Avx512};

const _: () = assert!(2 * (FULL as i32 + 128) * NARROW as i32 <= i16::MAX as i32, "16-bit sums must not saturate");

/// Products of bytes in pairs, for the vectors of a token.
#[derive(Clone, Copy)]
struct Pairs<V>(V);

impl Products for Pairs<Avx2> {
    type Vector = Avx2;
    type Code = u32;
    type Codes = __m256i;
    type Sums = __m256i;
    const SCALED: bool = true;

    intrinsics! {
        fn start(bias: i32) -> __m256i = _mm256_set1_epi32;
        fn to_floats(sums: __m256i) -> __m256 = _mm256_cvtepi32_ps;
    }

    #[inline(always)]
    fn vector(self) -> Avx2 {
        self.0
    }

    #[inline(always)]
    fn load(self, codes: &[u32]) -> __m256i {
        let codes: &[u32; avx2::LANES] = codes.first_chunk().expect("a vector of codes");
        // SAFETY: the token proves AVX2, and `codes` has LANES codes; the load need not be aligned.
        unsafe { _mm256_loadu_si256(codes.as_ptr().cast()) }
    }

    #[inline(always)]
    fn splat(self, code: u32) -> __m256i {
        // SAFETY: the token proves AVX2.
        unsafe { _mm256_set1_epi32(code.cast_signed()) }
    }

    #[inline(always)]
    fn add(self, sums: __m256i, reference: __m256i, query: __m256i) -> __m256i {
        // SAFETY: the token proves AVX2.
        unsafe {
            let pairs = _mm256_maddubs_epi16(reference, query);
            _mm256_add_epi32(sums, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)))
        }
    }
}

impl Products for Pairs<Avx512> {
    type Vector = Avx512;
    type Code = u32;
    type Codes = __m512i;
    type Sums = __m512i;
    const SCALED: bool = true;

    intrinsics! {
        fn start(bias: i32) -> __m512i = _mm512_set1_epi32;
        fn to_floats(sums: __m512i) -> __m512 = _mm512_cvtepi32_ps;
    }

    #[inline(always)]
    fn vector(self) -> Avx512 {
        self.0
    }

    #[inline(always)]
    fn load(self, codes: &[u32]) -> __m512i {
        let codes: &[u32; avx512::LANES] = codes.first_chunk().expect("a vector of codes");
        // SAFETY: the token proves AVX-512 F, and `codes` has LANES codes; the load need not be aligned.
        unsafe { _mm512_loadu_si512(codes.as_ptr().cast()) }
    }

    #[inline(always)]
    fn splat(self, code: u32) -> __m512i {
        // SAFETY: the token proves AVX-512 F.
        unsafe { _mm512_set1_epi32(code.cast_signed()) }
    }

    #[inline(always)]
    fn add(self, sums: __m512i, reference: __m512i, query: __m512i) -> __m512i {
        // SAFETY: the token proves AVX-512 F and BW.
        unsafe {
            let pairs = _mm512_maddubs_epi16(reference, query);
            _mm512_add_epi32(sums, _mm512_madd_epi16(pairs, _mm512_set1_epi16(1)))
        }
    }
}

/// The kernel for AVX2. A tile of 5 x 16 keys: ten registers of sums, two of references, and one each for the query, the
/// pairs and the ones.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Avx2I8(pub(crate) Avx2);

impl Avx2I8 {
    const MR: usize = 5;
    const NR: usize = 2 * avx2::LANES;
}

impl Microkernel for Avx2I8 {
    const MR: usize = Self::MR;
    const NR: usize = Self::NR;
    type Code = u32;
    type Encoding = Int8<NARROW>;

    fn scan(self, query: &QueryPanel<'_, u32>, run: &PanelRun<'_, u32>, candidates: &mut CandidateLists) {
        #[target_feature(enable = "avx2,fma")]
        fn scan<const ROWS: usize>(
            token: Avx2,
            query: &QueryPanel<'_, u32>,
            run: &PanelRun<'_, u32>,
            candidates: &mut CandidateLists,
        ) {
            generic::scan::<_, { Avx2I8::MR }, { Avx2I8::NR }, ROWS>(Pairs(token), query, run, None, candidates);
        }
        // SAFETY: the token in `self` proves AVX2 and FMA.
        unsafe {
            match query.thresholds.rows {
                0..=1 => scan::<1>(self.0, query, run, candidates),
                _ => scan::<{ Self::MR }>(self.0, query, run, candidates),
            }
        }
    }
}

/// The kernel for AVX-512: registers and tile as in the float32 kernel.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Avx512I8(pub(crate) Avx512);

impl Avx512I8 {
    const MR: usize = 12;
    const NR: usize = 2 * avx512::LANES;
}

impl Microkernel for Avx512I8 {
    const MR: usize = Self::MR;
    const NR: usize = Self::NR;
    type Code = u32;
    type Encoding = Int8<NARROW>;

    fn scan(self, query: &QueryPanel<'_, u32>, run: &PanelRun<'_, u32>, candidates: &mut CandidateLists) {
        #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
        fn scan<const ROWS: usize>(
            token: Avx512,
            query: &QueryPanel<'_, u32>,
            run: &PanelRun<'_, u32>,
            candidates: &mut CandidateLists,
        ) {
            generic::scan::<_, { Avx512I8::MR }, { Avx512I8::NR }, ROWS>(Pairs(token), query, run, None, candidates);
        }
        // SAFETY: the token in `self` proves AVX-512 F, BW, DQ and VL.
        unsafe {
            match query.thresholds.rows {
                0..=1 => scan::<1>(self.0, query, run, candidates),
                2..=4 => scan::<4>(self.0, query, run, candidates),
                _ => scan::<{ Self::MR }>(self.0, query, run, candidates),
            }
        }
    }
}
