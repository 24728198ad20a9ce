//! The int8 kernels: AVX-512 VNNI, and AVX-VNNI for CPUs with 8-bit products but without AVX-512.
//!
//! ```text
//! sums (32 bits) ── += four products of an unsigned and a signed byte per lane ── vpdpbusd, one instruction
//! start: -128 sum(query codes)        reference codes + 128: unsigned        query codes: signed
//! end:   the exact product of the codes ──> float32 ──scales, offset──> key
//! ```
//!
//! The instruction takes one unsigned operand, so references are stored with 128 added, and the start value of the sums
//! undoes it. Sums are exact: `127^2` times at most 65,536 columns fits in 32 bits. The instruction without saturation is
//! used, so an intermediate overflow wraps and cancels.
//!
//! For few queries there are tiles of fewer rows: their time is reading packed references from memory, and unused rows of a
//! tile would add products to it.

use std::arch::x86_64::*;

use super::{avx2, avx512};
use crate::arch::generic::{self, Products};
use crate::arch::kernel::{CandidateLists, FULL, Int8, Microkernel, PanelRun, QueryPanel, ScanSymmetric, Transposed};
use crate::arch::level::{Avx2, Avx512, Avx512Vnni, AvxVnni};

impl Products for AvxVnni {
    type Vector = Avx2;
    type Code = u32;
    type Codes = __m256i;
    type Sums = __m256i;
    const SCALED: bool = true;

    intrinsics! {
        fn start(bias: i32) -> __m256i = _mm256_set1_epi32;
        fn add(sums: __m256i, reference: __m256i, query: __m256i) -> __m256i = _mm256_dpbusd_avx_epi32;
        fn to_floats(sums: __m256i) -> __m256 = _mm256_cvtepi32_ps;
    }

    // The products of the added 128 with all codes of the query are subtracted in advance.
    #[inline(always)]
    fn vector(self) -> Avx2 {
        self.avx2()
    }

    #[inline(always)]
    fn load(self, codes: &[u32]) -> __m256i {
        let codes: &[u32; avx2::LANES] = codes.first_chunk().expect("a vector of codes");
        // SAFETY: `self` proves AVX2, and `codes` has LANES codes; the load need not be aligned.
        unsafe { _mm256_loadu_si256(codes.as_ptr().cast()) }
    }

    #[inline(always)]
    fn splat(self, code: u32) -> __m256i {
        // SAFETY: `self` proves AVX2.
        unsafe { _mm256_set1_epi32(code.cast_signed()) }
    }
}

impl Products for Avx512Vnni {
    type Vector = Avx512;
    type Code = u32;
    type Codes = __m512i;
    type Sums = __m512i;
    const SCALED: bool = true;

    intrinsics! {
        fn start(bias: i32) -> __m512i = _mm512_set1_epi32;
        fn add(sums: __m512i, reference: __m512i, query: __m512i) -> __m512i = _mm512_dpbusd_epi32;
        fn to_floats(sums: __m512i) -> __m512 = _mm512_cvtepi32_ps;
    }

    #[inline(always)]
    fn vector(self) -> Avx512 {
        self.avx512()
    }

    #[inline(always)]
    fn load(self, codes: &[u32]) -> __m512i {
        let codes: &[u32; avx512::LANES] = codes.first_chunk().expect("a vector of codes");
        // SAFETY: `self` proves AVX-512 F, and `codes` has LANES codes; the load need not be aligned.
        unsafe { _mm512_loadu_si512(codes.as_ptr().cast()) }
    }

    #[inline(always)]
    fn splat(self, code: u32) -> __m512i {
        // SAFETY: `self` proves AVX-512 F.
        unsafe { _mm512_set1_epi32(code.cast_signed()) }
    }
}

/// The kernel for AVX-VNNI: registers and tile as in the float32 kernel for AVX2.
#[derive(Debug, Clone, Copy)]
pub(crate) struct AvxVnniI8(pub(crate) AvxVnni);

impl AvxVnniI8 {
    // Associated constants, so that they can be arguments of `generic::scan` inside the functions below.
    const MR: usize = 6;
    const NR: usize = 2 * avx2::LANES;
}

impl Microkernel for AvxVnniI8 {
    const MR: usize = Self::MR;
    const NR: usize = Self::NR;
    type Code = u32;
    type Encoding = Int8<FULL>;

    fn scan(self, query: &QueryPanel<'_, u32>, run: &PanelRun<'_, u32>, candidates: &mut CandidateLists) {
        #[target_feature(enable = "avx2,fma,avxvnni")]
        fn scan<const ROWS: usize>(
            token: AvxVnni,
            query: &QueryPanel<'_, u32>,
            run: &PanelRun<'_, u32>,
            candidates: &mut CandidateLists,
        ) {
            generic::scan::<_, { AvxVnniI8::MR }, { AvxVnniI8::NR }, ROWS>(token, query, run, None, candidates);
        }
        // A constant number of rows per variant: sums in registers need indices that are known at compile time.
        // SAFETY: the token in `self` proves AVX2, FMA and AVX-VNNI.
        unsafe {
            match query.thresholds.rows {
                0..=1 => scan::<1>(self.0, query, run, candidates),
                _ => scan::<{ Self::MR }>(self.0, query, run, candidates),
            }
        }
    }
}

/// The kernel for AVX-512 VNNI: registers and tile as in the float32 kernel for AVX-512.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Avx512VnniI8(pub(crate) Avx512Vnni);

impl Avx512VnniI8 {
    const MR: usize = 12;
    const NR: usize = 2 * avx512::LANES;
}

impl Microkernel for Avx512VnniI8 {
    const MR: usize = Self::MR;
    const NR: usize = Self::NR;
    type Code = u32;
    type Encoding = Int8<FULL>;

    fn scan(self, query: &QueryPanel<'_, u32>, run: &PanelRun<'_, u32>, candidates: &mut CandidateLists) {
        #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
        fn scan<const ROWS: usize>(
            token: Avx512Vnni,
            query: &QueryPanel<'_, u32>,
            run: &PanelRun<'_, u32>,
            candidates: &mut CandidateLists,
        ) {
            generic::scan::<_, { Avx512VnniI8::MR }, { Avx512VnniI8::NR }, ROWS>(token, query, run, None, candidates);
        }
        // SAFETY: the token in `self` proves AVX-512 F, BW, DQ, VL and VNNI.
        unsafe {
            match query.thresholds.rows {
                0..=1 => scan::<1>(self.0, query, run, candidates),
                2..=4 => scan::<4>(self.0, query, run, candidates),
                _ => scan::<{ Self::MR }>(self.0, query, run, candidates),
            }
        }
    }

    // No other kernel has one: at other levels a self-search scans both sides of each pair.
    const SCAN_SYMMETRIC: Option<ScanSymmetric<Self>> = Some(|kernel, query, run, transposed, candidates| {
        #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
        fn scan(
            token: Avx512Vnni,
            query: &QueryPanel<'_, u32>,
            run: &PanelRun<'_, u32>,
            transposed: &Transposed<'_>,
            candidates: &mut CandidateLists,
        ) {
            // Always all rows: blocks of a self-search fill their panels.
            const MR: usize = Avx512VnniI8::MR;
            generic::scan::<_, MR, { Avx512VnniI8::NR }, MR>(token, query, run, Some(transposed), candidates);
        }
        // SAFETY: the token in `kernel` proves AVX-512 F, BW, DQ, VL and VNNI.
        unsafe { scan(kernel.0, query, run, transposed, candidates) }
    });
}
