//! The float32 kernel for AVX-512.
//!
//! A tile of 12 x 32 keys takes 24 of the 32 registers as accumulators, two for the references and one for the query.

use std::arch::x86_64::*;

use crate::kernel::{Centred, Hits, Kernel, MAX_MR, PanelRun, PanelTerms, QueryPanel, RowTerms};
use crate::level::Avx512;
use crate::pack;

/// The kernel, with the proof that the CPU runs it.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Avx512F32(pub(crate) Avx512);

const MR: usize = 12;
const NR: usize = 32;
const LANES: usize = 16;

impl Kernel for Avx512F32 {
    const MR: usize = MR;
    const NR: usize = NR;
    const STEP: usize = 1;
    type QueryCode = f32;
    type ReferenceCode = f32;

    fn encode_reference(row: &Centred<'_>, lane: usize, panel: &mut [f32]) -> PanelTerms {
        pack::f32::encode_reference(row, lane, NR, panel)
    }

    fn encode_query(row: &Centred<'_>, lane: usize, panel: &mut [f32]) -> RowTerms {
        pack::f32::encode_query(row, lane, MR, panel)
    }

    fn scan(self, query: &QueryPanel<'_, f32>, run: &PanelRun<'_, f32>, hits: &mut Hits) {
        // SAFETY: the token in `self` proves AVX-512 F, BW, DQ and VL.
        unsafe { scan(query, run, hits) }
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
fn scan(query: &QueryPanel<'_, f32>, run: &PanelRun<'_, f32>, hits: &mut Hits) {
    let steps = query.codes.len() / MR;
    let mut bars = [0.0; MAX_MR];
    for (p, (codes, offsets)) in run.codes.chunks_exact(steps * NR).zip(run.offsets.chunks_exact(NR)).enumerate() {
        let mut tile = [[_mm512_setzero_ps(); 2]; MR];
        // Slices of one length each, so that the pointers below stay inside them for every step.
        let (q, r) = (&query.codes[..steps * MR], &codes[..steps * NR]);
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
        query.bars.against(run.terms[p], &mut bars);
        for half in 0..2 {
            let offset: &[f32; LANES] = offsets[half * LANES..][..LANES].try_into().expect("LANES offsets");
            // SAFETY: `offset` has LANES numbers.
            let offset = unsafe { _mm512_loadu_ps(offset.as_ptr()) };
            let first = (run.first_row + (p * NR + half * LANES) as u32) as i32;
            for m in 0..MR {
                let key = _mm512_sub_ps(tile[m][half], offset);
                // "Not less than": a key that is not a number must be reported.
                let over = _mm512_cmp_ps_mask::<_CMP_NLT_UQ>(key, _mm512_set1_ps(bars[m]));
                if over != 0 {
                    let lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
                    let rows = _mm512_add_epi32(_mm512_set1_epi32(first), lanes);
                    let (row_tail, key_tail) = hits.tail(m);
                    let row_tail: &mut [u32; LANES] = row_tail.try_into().expect("LANES places");
                    let key_tail: &mut [f32; LANES] = key_tail.try_into().expect("LANES places");
                    // Compressed in a register, then stored whole: the compressing store is very slow on some CPUs.
                    // SAFETY: both tails have room for LANES numbers.
                    unsafe {
                        _mm512_storeu_si512(row_tail.as_mut_ptr().cast(), _mm512_maskz_compress_epi32(over, rows));
                        _mm512_storeu_ps(key_tail.as_mut_ptr(), _mm512_maskz_compress_ps(over, key));
                    }
                    hits.grow(m, over.count_ones() as usize);
                }
            }
        }
    }
}
