//! Plain Rust: vectors and the float32 kernel for every CPU.
//!
//! A vector is an array of four numbers, which the compiler keeps in one of the 128-bit registers that x86-64 and aarch64
//! guarantee. A tile of 4 x 8 keys takes eight of the sixteen registers of x86-64.
//!
//! This level is for CPUs without AVX2, and the reference for the tests of all others: it has no intrinsics and no unsafe
//! code. Its keys may differ from those of other levels in their last bits, since sums are not fused. The bound covers both,
//! and results do not depend on keys.

use crate::arch::generic::{self, Float32Products, Vector};
use crate::arch::kernel::{CandidateLists, Float32, Microkernel, PanelRun, QueryPanel};
use crate::arch::kernel::{UNPACKED_LANES, UNPACKED_ROWS, UnpackedQueries};
use crate::arch::unpacked;

/// The token of this level. Anyone may make it: the operations need nothing beyond the compilation target.
#[derive(Clone, Copy)]
struct Portable;

/// Numbers in a vector: 128 bits, the least that the targets guarantee.
const LANES: usize = 4;

impl Vector for Portable {
    type Floats = [f32; LANES];
    const LANES: usize = LANES;

    #[inline(always)]
    fn splat(self, x: f32) -> [f32; LANES] {
        [x; LANES]
    }

    #[inline(always)]
    fn load(self, numbers: &[f32]) -> [f32; LANES] {
        // One check of the length, then an array without bounds checks.
        *numbers.first_chunk().expect("a vector of numbers")
    }

    #[inline(always)]
    fn repeat<const WIDTH: usize>(self, numbers: &[f32; WIDTH]) -> [f32; LANES] {
        [numbers[0], numbers[1 % WIDTH], numbers[2 % WIDTH], numbers[3 % WIDTH]]
    }

    #[inline(always)]
    fn sum_groups<const WIDTH: usize>(self, x: [f32; LANES]) -> [f32; LANES] {
        let pairs = if WIDTH >= 2 { [x[0] + x[1], x[1] + x[0], x[2] + x[3], x[3] + x[2]] } else { x };
        if WIDTH >= 4 { self.add(pairs, [pairs[2], pairs[3], pairs[0], pairs[1]]) } else { pairs }
    }

    #[inline(always)]
    fn add(self, x: [f32; LANES], y: [f32; LANES]) -> [f32; LANES] {
        [x[0] + y[0], x[1] + y[1], x[2] + y[2], x[3] + y[3]]
    }

    #[inline(always)]
    fn sub(self, x: [f32; LANES], y: [f32; LANES]) -> [f32; LANES] {
        [x[0] - y[0], x[1] - y[1], x[2] - y[2], x[3] - y[3]]
    }

    #[inline(always)]
    fn mul(self, x: [f32; LANES], y: [f32; LANES]) -> [f32; LANES] {
        [x[0] * y[0], x[1] * y[1], x[2] * y[2], x[3] * y[3]]
    }

    // Two roundings: a fused multiply-add is a library call if the target does not guarantee the instruction.
    #[inline(always)]
    fn mul_add(self, x: [f32; LANES], y: [f32; LANES], z: [f32; LANES]) -> [f32; LANES] {
        [x[0] * y[0] + z[0], x[1] * y[1] + z[1], x[2] * y[2] + z[2], x[3] * y[3] + z[3]]
    }

    #[inline(always)]
    fn mul_sub(self, x: [f32; LANES], y: [f32; LANES], z: [f32; LANES]) -> [f32; LANES] {
        self.sub(self.mul(x, y), z)
    }

    #[inline(always)]
    fn neg_mul_add(self, x: [f32; LANES], y: [f32; LANES], z: [f32; LANES]) -> [f32; LANES] {
        self.sub(z, self.mul(x, y))
    }

    #[inline(always)]
    fn not_less(self, x: [f32; LANES], y: [f32; LANES]) -> u32 {
        // `!(x < y)` and not `x >= y`: they differ for NaN.
        let mut over = 0;
        for lane in 0..LANES {
            #[expect(clippy::neg_cmp_op_on_partial_ord, reason = "the bit of a NaN lane is set")]
            let bit = !(x[lane] < y[lane]);
            over |= u32::from(bit) << lane;
        }
        over
    }

    #[inline(always)]
    fn report(self, candidates: &mut CandidateLists, m: usize, first: u32, over: u32, keys: [f32; LANES]) {
        // Lane by lane: candidates ascend.
        for lane in 0..LANES {
            if over >> lane & 1 == 1 {
                candidates.push(m, first + lane as u32, keys[lane]);
            }
        }
    }
}

/// The float32 kernel.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ScalarF32;

// Eight accumulators leave half of the registers for codes and for what the compiler needs.
const MR: usize = 4;
const NR: usize = 2 * LANES;

impl Microkernel for ScalarF32 {
    const MR: usize = MR;
    const NR: usize = NR;
    type Code = f32;
    type Encoding = Float32;

    fn scan(self, query: &QueryPanel<'_, f32>, run: &PanelRun<'_, f32>, candidates: &mut CandidateLists) {
        // Always all rows: this level has no variant for few queries.
        generic::scan::<_, MR, NR, MR>(Float32Products(Portable), query, run, None, candidates);
    }
}

/// See [`unpacked_over`](crate::arch::unpacked_over).
pub(super) fn unpacked_over<const PRODUCTS: bool>(
    queries: &UnpackedQueries,
    rows: [&[f32]; UNPACKED_ROWS],
    norms: [f32; UNPACKED_ROWS],
) -> [u32; UNPACKED_ROWS] {
    // Vectors for the sixteen lanes.
    const PARTS: usize = UNPACKED_LANES / LANES;
    // Two rows at a time: eight vectors of sums, as in a tile. All four would need sixteen registers for sums alone.
    let ([a, b, c, d], [n, o, p, q]) = (rows, norms);
    let [a, b] = unpacked::over::<_, PARTS, 2, PRODUCTS>(Portable, queries, [a, b], [n, o]);
    let [c, d] = unpacked::over::<_, PARTS, 2, PRODUCTS>(Portable, queries, [c, d], [p, q]);
    [a, b, c, d]
}
