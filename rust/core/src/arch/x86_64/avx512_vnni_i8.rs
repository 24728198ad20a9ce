//! The int8 kernel for AVX-512 VNNI.
//!
//! A tile of 12 x 32 keys takes 24 of the 32 registers as accumulators, two for the references and one for the query. Few
//! queries take a tile of fewer rows: against packed references in memory they wait for the memory, not for products.
//!
//! One instruction adds four products of an unsigned and a signed byte to each 32-bit lane: references are the unsigned
//! operand (their codes plus 128), and the accumulators start from minus 128 times the sum of the query's codes.

use std::arch::x86_64::*;

use crate::arch::kernel::{CandidateLists, Int8, Kernel, MAX_MR, PanelRun, QueryPanel, ScanSymmetric, Transposed};
use crate::arch::level::Avx512Vnni;

/// The kernel, with the proof that the CPU runs it.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Avx512VnniI8(pub(crate) Avx512Vnni);

const MR: usize = 12;
const NR: usize = 32;
const LANES: usize = 16;

impl Kernel for Avx512VnniI8 {
    const MR: usize = MR;
    const NR: usize = NR;
    type Code = u32;
    type Encoding = Int8;

    fn scan(self, query: &QueryPanel<'_, u32>, run: &PanelRun<'_, u32>, candidates: &mut CandidateLists) {
        let columns = Transposed::closed(&[]);
        // SAFETY: the token in `self` proves AVX-512 F, BW, DQ, VL and VNNI.
        unsafe {
            match query.thresholds.rows {
                0..=1 => scan::<false, 1>(query, run, &columns, candidates),
                2..=4 => scan::<false, 4>(query, run, &columns, candidates),
                _ => scan::<false, MR>(query, run, &columns, candidates),
            }
        }
    }

    const SCAN_SYMMETRIC: Option<ScanSymmetric<Self>> = Some(|_, query, run, columns, candidates| {
        // SAFETY: the token that the first argument holds proves AVX-512 F, BW, DQ, VL and VNNI.
        unsafe { scan::<true, MR>(query, run, columns, candidates) }
    });
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
fn scan<const BOTH: bool, const ROWS: usize>(
    query: &QueryPanel<'_, u32>,
    run: &PanelRun<'_, u32>,
    columns: &Transposed<'_>,
    candidates: &mut CandidateLists,
) {
    let steps = query.codes.len() / MR;
    let (mut thresholds, mut lacks) = ([0.0; MAX_MR], [0.0; MAX_MR]);
    for p in run.start..run.end {
        if run.visit.leaves_out(p) {
            continue;
        }
        let mut tile: [[__m512i; 2]; ROWS] = std::array::from_fn(|m| [_mm512_set1_epi32(query.thresholds.bias[m]); 2]);
        // Slices of one length each, so that the pointers below stay inside them for every step.
        let (q, r) = (&query.codes[..steps * MR], &run.codes[p * steps * NR..][..steps * NR]);
        let (mut q, mut r) = (q.as_ptr(), r.as_ptr());
        for _ in 0..steps {
            // SAFETY: `r` and `q` have NR and MR more codes in each of the `steps` rounds, and are advanced by as many; ROWS
            // is at most MR.
            unsafe {
                let (r0, r1) = (_mm512_loadu_si512(r.cast()), _mm512_loadu_si512(r.add(LANES).cast()));
                for (m, dots) in tile.iter_mut().enumerate() {
                    let x = _mm512_set1_epi32((*q.add(m)).cast_signed());
                    dots[0] = _mm512_dpbusd_epi32(dots[0], r0, x);
                    dots[1] = _mm512_dpbusd_epi32(dots[1], r1, x);
                }
                q = q.add(MR);
                r = r.add(NR);
            }
        }
        query.thresholds.against(run.terms[p], &mut thresholds);
        if BOTH {
            columns.against(query.thresholds, run.terms[p], &mut lacks);
        }
        for half in 0..2 {
            let at = p * NR + half * LANES;
            let offset: &[f32; LANES] = run.offsets[at..][..LANES].try_into().expect("LANES offsets");
            let scale: &[f32; LANES] = run.scales[at..][..LANES].try_into().expect("LANES scales");
            // SAFETY: both have LANES numbers.
            let (offset, scale) = unsafe { (_mm512_loadu_ps(offset.as_ptr()), _mm512_loadu_ps(scale.as_ptr())) };
            let floor = if BOTH {
                let floor: &[f32; LANES] =
                    columns.floors[at - run.start * NR..][..LANES].try_into().expect("LANES floors");
                // SAFETY: it has LANES numbers.
                unsafe { _mm512_loadu_ps(floor.as_ptr()) }
            } else {
                _mm512_setzero_ps()
            };
            for m in 0..ROWS {
                let dot = _mm512_mul_ps(_mm512_cvtepi32_ps(tile[m][half]), scale);
                let key = _mm512_fmsub_ps(dot, _mm512_set1_ps(query.thresholds.scale[m]), offset);
                // "Not less than": a key that is not a number must be reported.
                let mut over = _mm512_cmp_ps_mask::<_CMP_NLT_UQ>(key, _mm512_set1_ps(thresholds[m]));
                if BOTH {
                    let most =
                        _mm512_fmadd_ps(dot, _mm512_set1_ps(query.thresholds.scale[m]), _mm512_set1_ps(lacks[m]));
                    over |= _mm512_cmp_ps_mask::<_CMP_NLT_UQ>(most, floor);
                }
                if over != 0 {
                    super::report_avx512(candidates, m, at as u32, over, key);
                }
            }
        }
    }
}
