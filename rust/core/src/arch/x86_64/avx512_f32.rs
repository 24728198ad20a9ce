//! The float32 kernel for AVX-512.
//!
//! A tile of 12 x 32 keys takes 24 of the 32 registers as accumulators, two for the references and one for the query.

use std::arch::x86_64::*;

use crate::arch::kernel::{CandidateLists, Float32, Kernel, MAX_MR, PanelRun, QueryPanel};
use crate::arch::level::Avx512;

/// The kernel, with the proof that the CPU runs it.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Avx512F32(pub(crate) Avx512);

const MR: usize = 12;
const NR: usize = 32;
const LANES: usize = 16;

impl Kernel for Avx512F32 {
    const MR: usize = MR;
    const NR: usize = NR;
    type Code = f32;
    type Encoding = Float32;

    fn scan(self, query: &QueryPanel<'_, f32>, run: &PanelRun<'_, f32>, candidates: &mut CandidateLists) {
        // SAFETY: the token in `self` proves AVX-512 F, BW, DQ and VL.
        unsafe { scan(query, run, candidates) }
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
fn scan(query: &QueryPanel<'_, f32>, run: &PanelRun<'_, f32>, candidates: &mut CandidateLists) {
    let steps = query.codes.len() / MR;
    let mut thresholds = [0.0; MAX_MR];
    for p in run.start..run.end {
        if run.visit.leaves_out(p) {
            continue;
        }
        let mut tile = [[_mm512_setzero_ps(); 2]; MR];
        // Slices of one length each, so that the pointers below stay inside them for every step.
        let (q, r) = (&query.codes[..steps * MR], &run.codes[p * steps * NR..][..steps * NR]);
        let (mut q, mut r) = (q.as_ptr(), r.as_ptr());
        for _ in 0..steps {
            // SAFETY: `r` and `q` have NR and MR more numbers in each of the `steps` rounds, and are advanced by as many.
            unsafe {
                let (r0, r1) = (_mm512_loadu_ps(r), _mm512_loadu_ps(r.add(LANES)));
                for (m, dots) in tile.iter_mut().enumerate() {
                    let x = _mm512_set1_ps(*q.add(m));
                    dots[0] = _mm512_fmadd_ps(x, r0, dots[0]);
                    dots[1] = _mm512_fmadd_ps(x, r1, dots[1]);
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
            let offset = unsafe { _mm512_loadu_ps(offset.as_ptr()) };
            let first = (p * NR + half * LANES) as u32;
            for m in 0..MR {
                let key = _mm512_sub_ps(tile[m][half], offset);
                // "Not less than": a key that is not a number must be reported.
                let over = _mm512_cmp_ps_mask::<_CMP_NLT_UQ>(key, _mm512_set1_ps(thresholds[m]));
                if over != 0 {
                    super::report_avx512(candidates, m, first, over, key);
                }
            }
        }
    }
}
