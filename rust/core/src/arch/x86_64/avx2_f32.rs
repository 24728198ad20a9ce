//! The float32 kernel for AVX2 and FMA.
//!
//! A tile of 6 x 16 keys takes twelve of the sixteen registers as accumulators, two for the references and one for the
//! query: enough independent chains to hide the latency of two fused multiply-adds a cycle.

use std::arch::x86_64::*;

use crate::arch::kernel::{CandidateLists, Float32, Kernel, MAX_MR, PanelRun, QueryPanel};
use crate::arch::level::Avx2;

/// The kernel, with the proof that the CPU runs it.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Avx2F32(pub(crate) Avx2);

const MR: usize = 6;
const NR: usize = 16;
const LANES: usize = 8;

impl Kernel for Avx2F32 {
    const MR: usize = MR;
    const NR: usize = NR;
    type Code = f32;
    type Encoding = Float32;

    fn scan(self, query: &QueryPanel<'_, f32>, run: &PanelRun<'_, f32>, candidates: &mut CandidateLists) {
        // SAFETY: the token in `self` proves AVX2 and FMA.
        unsafe { scan(query, run, candidates) }
    }
}

#[target_feature(enable = "avx2,fma")]
fn scan(query: &QueryPanel<'_, f32>, run: &PanelRun<'_, f32>, candidates: &mut CandidateLists) {
    let steps = query.codes.len() / MR;
    let mut thresholds = [0.0; MAX_MR];
    for p in run.start..run.end {
        if run.visit.leaves_out(p) {
            continue;
        }
        let mut tile = [[_mm256_setzero_ps(); 2]; MR];
        // Slices of one length each, so that the pointers below stay inside them for every step.
        let (q, r) = (&query.codes[..steps * MR], &run.codes[p * steps * NR..][..steps * NR]);
        let (mut q, mut r) = (q.as_ptr(), r.as_ptr());
        for _ in 0..steps {
            // SAFETY: `r` and `q` have NR and MR more numbers in each of the `steps` rounds, and are advanced by as many.
            unsafe {
                let (r0, r1) = (_mm256_loadu_ps(r), _mm256_loadu_ps(r.add(LANES)));
                for (m, dots) in tile.iter_mut().enumerate() {
                    let x = _mm256_set1_ps(*q.add(m));
                    dots[0] = _mm256_fmadd_ps(x, r0, dots[0]);
                    dots[1] = _mm256_fmadd_ps(x, r1, dots[1]);
                }
                q = q.add(MR);
                r = r.add(NR);
            }
        }
        query.thresholds.against(run.terms[p], &mut thresholds);
        for half in 0..2 {
            let offset: &[f32; LANES] =
                run.offsets[p * NR + half * LANES..][..LANES].try_into().expect("LANES offsets");
            // SAFETY: `offset` has LANES numbers.
            let offset = unsafe { _mm256_loadu_ps(offset.as_ptr()) };
            for m in 0..MR {
                let key = _mm256_sub_ps(tile[m][half], offset);
                // "Not less than": a key that is not a number must be reported.
                let over = _mm256_cmp_ps::<_CMP_NLT_UQ>(key, _mm256_set1_ps(thresholds[m]));
                let over = _mm256_movemask_ps(over) as u32;
                if over != 0 {
                    super::report_avx2(candidates, m, (p * NR + half * LANES) as u32, over, key);
                }
            }
        }
    }
}
