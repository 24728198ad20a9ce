//! The float32 kernel in plain Rust: the one that every CPU runs.
//!
//! A tile of 4 x 8 keys fits the sixteen 128-bit registers that x86-64 and aarch64 guarantee, and the compiler
//! vectorises the inner loop over the eight references.

use crate::arch::kernel::{CandidateLists, Float32, Kernel, MAX_MR, PanelRun, QueryPanel};

/// Needs no token: it uses nothing beyond the compilation target.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ScalarF32;

const MR: usize = 4;
const NR: usize = 8;

impl Kernel for ScalarF32 {
    const MR: usize = MR;
    const NR: usize = NR;
    type Code = f32;
    type Encoding = Float32;

    fn scan(self, query: &QueryPanel<'_, f32>, run: &PanelRun<'_, f32>, candidates: &mut CandidateLists) {
        let panel_len = query.codes.len() / MR * NR;
        let mut thresholds = [0.0; MAX_MR];
        for p in run.start..run.end {
            if run.visit.leaves_out(p) {
                continue;
            }
            let (codes, offsets) = (&run.codes[p * panel_len..][..panel_len], &run.offsets[p * NR..][..NR]);
            let mut tile = [[0.0f32; NR]; MR];
            for (q, r) in query.codes.chunks_exact(MR).zip(codes.chunks_exact(NR)) {
                for m in 0..MR {
                    for n in 0..NR {
                        tile[m][n] += q[m] * r[n];
                    }
                }
            }
            query.thresholds.against(run.terms[p], &mut thresholds);
            for (m, dots) in tile.iter().enumerate() {
                for (n, dot) in dots.iter().enumerate() {
                    let key = dot - offsets[n];
                    // Not `>=`: a key that is not a number must be reported.
                    #[expect(clippy::neg_cmp_op_on_partial_ord, reason = "NaN must pass")]
                    if !(key < thresholds[m]) {
                        candidates.push(m, (p * NR + n) as u32, key);
                    }
                }
            }
        }
    }
}
