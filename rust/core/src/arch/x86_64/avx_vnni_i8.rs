//! The int8 kernel for AVX-VNNI: CPUs that multiply bytes but lack AVX-512.
//!
//! A tile of 6 x 16 keys takes twelve of the sixteen registers as accumulators, two for the references and one for the query.
//!
//! One instruction adds four products of an unsigned and a signed byte to each 32-bit lane: references are the unsigned
//! operand (their codes plus 128), and the accumulators start from minus 128 times the sum of the query's codes.

use std::arch::x86_64::*;

use crate::arch::kernel::{CandidateLists, Int8, Kernel, MAX_MR, PanelRun, QueryPanel};
use crate::arch::level::AvxVnni;

/// The kernel, with the proof that the CPU runs it.
#[derive(Debug, Clone, Copy)]
pub(crate) struct AvxVnniI8(pub(crate) AvxVnni);

const MR: usize = 6;
const NR: usize = 16;
const LANES: usize = 8;

impl Kernel for AvxVnniI8 {
    const MR: usize = MR;
    const NR: usize = NR;
    type Code = u32;
    type Encoding = Int8;

    fn scan(self, query: &QueryPanel<'_, u32>, run: &PanelRun<'_, u32>, candidates: &mut CandidateLists) {
        // SAFETY: the token in `self` proves AVX2, FMA and AVX-VNNI.
        unsafe {
            // One query waits for the memory, not for products.
            if query.thresholds.rows <= 1 {
                scan::<1>(query, run, candidates)
            } else {
                scan::<MR>(query, run, candidates)
            }
        }
    }
}

#[target_feature(enable = "avx2,fma,avxvnni")]
fn scan<const ROWS: usize>(query: &QueryPanel<'_, u32>, run: &PanelRun<'_, u32>, candidates: &mut CandidateLists) {
    let steps = query.codes.len() / MR;
    let mut thresholds = [0.0; MAX_MR];
    for p in run.start..run.end {
        if run.visit.leaves_out(p) {
            continue;
        }
        let mut tile: [[__m256i; 2]; ROWS] = std::array::from_fn(|m| [_mm256_set1_epi32(query.thresholds.bias[m]); 2]);
        // Slices of one length each, so that the pointers below stay inside them for every step.
        let (q, r) = (&query.codes[..steps * MR], &run.codes[p * steps * NR..][..steps * NR]);
        let (mut q, mut r) = (q.as_ptr(), r.as_ptr());
        for _ in 0..steps {
            // SAFETY: `r` and `q` have NR and MR more codes in each of the `steps` rounds, and are advanced by as many; ROWS
            // is at most MR.
            unsafe {
                let (r0, r1) = (_mm256_loadu_si256(r.cast()), _mm256_loadu_si256(r.add(LANES).cast()));
                for (m, dots) in tile.iter_mut().enumerate() {
                    let x = _mm256_set1_epi32((*q.add(m)).cast_signed());
                    dots[0] = _mm256_dpbusd_avx_epi32(dots[0], r0, x);
                    dots[1] = _mm256_dpbusd_avx_epi32(dots[1], r1, x);
                }
                q = q.add(MR);
                r = r.add(NR);
            }
        }
        query.thresholds.against(run.terms[p], &mut thresholds);
        for half in 0..2 {
            let at = p * NR + half * LANES;
            let offset: &[f32; LANES] = run.offsets[at..][..LANES].try_into().expect("LANES offsets");
            let scale: &[f32; LANES] = run.scales[at..][..LANES].try_into().expect("LANES scales");
            // SAFETY: both have LANES numbers.
            let (offset, scale) = unsafe { (_mm256_loadu_ps(offset.as_ptr()), _mm256_loadu_ps(scale.as_ptr())) };
            for m in 0..ROWS {
                let dot = _mm256_mul_ps(_mm256_cvtepi32_ps(tile[m][half]), scale);
                let key = _mm256_fmsub_ps(dot, _mm256_set1_ps(query.thresholds.scale[m]), offset);
                // "Not less than": a key that is not a number must be reported.
                let over = _mm256_movemask_ps(_mm256_cmp_ps::<_CMP_NLT_UQ>(key, _mm256_set1_ps(thresholds[m]))) as u32;
                if over != 0 {
                    super::report_avx2(candidates, m, at as u32, over, key);
                }
            }
        }
    }
}
