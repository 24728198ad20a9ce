//! The microkernels, and the choice among them.
//!
//! ```text
//! level           features of the CPU, and the tokens that prove them
//! kernel          the contract: encodings, panels, thresholds, candidates
//! generic         the tile loop, over the vectors of any instruction set
//! unpacked        few queries and rows as they were passed, over the same vectors
//! scalar, x86_64  the vectors and the kernels of each instruction set
//! minkowski_f32   distances that are not sums of products: plain Rust, compiled for each level
//! ```
//!
//! A kernel is chosen once per search, by [`WithKernel`]; everything inside the scan of a run is then monomorphic and
//! inlined.

mod generic;
pub(crate) mod kernel;
pub(crate) mod level;
pub(crate) mod minkowski_f32;
pub(crate) mod scalar;
mod unpacked;
#[cfg(target_arch = "x86_64")]
pub(crate) mod x86_64;

use crate::arch::kernel::{Microkernel, UnpackedQueries};
pub(crate) use crate::arch::kernel::{UNPACKED_LANES, UNPACKED_ROWS};
use crate::arch::level::{Features, Level, Simd};
use crate::metric::Metric;
use minkowski_f32::{LpF32, NARROW, WIDE};

/// Work that is generic over kernels. A trait, since a closure cannot be generic.
pub(crate) trait WithKernel {
    type Output;
    fn run<K: Microkernel + 'static>(self, kernel: K) -> Self::Output;
}

/// Run `work` with the float32 kernel of a level.
pub(crate) fn with_float32<W: WithKernel>(simd: Simd, work: W) -> W::Output {
    #[cfg(target_arch = "x86_64")]
    {
        if let Some(token) = simd.avx512() {
            return work.run(x86_64::avx512::Avx512F32(token));
        }
        if let Some(token) = simd.avx2() {
            return work.run(x86_64::avx2::Avx2F32(token));
        }
    }
    let _ = simd;
    work.run(scalar::ScalarF32)
}

/// How a level multiplies 8-bit integers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ByteProducts {
    /// Not at all.
    None,
    /// In pairs of 16 bits, by three instructions.
    Pairs,
    /// By one instruction that adds four products to a sum.
    Dot,
}

/// How a level multiplies 8-bit integers.
pub(crate) fn byte_products(level: Level) -> ByteProducts {
    let features = level.features();
    if features.contains(Features::AVX512_VNNI) || features.contains(Features::AVX_VNNI) {
        ByteProducts::Dot
    } else if features.contains(Features::AVX2) {
        ByteProducts::Pairs
    } else {
        ByteProducts::None
    }
}

/// Whether a level has an int8 kernel.
pub(crate) fn has_int8(level: Level) -> bool {
    byte_products(level) != ByteProducts::None
}

/// Run `work` with the int8 kernel of a level, or with its float32 kernel if it has none.
pub(crate) fn with_int8<W: WithKernel>(simd: Simd, work: W) -> W::Output {
    #[cfg(target_arch = "x86_64")]
    {
        // The wider vectors first.
        if let Some(token) = simd.avx512_vnni() {
            return work.run(x86_64::vnni::Avx512VnniI8(token));
        }
        if let Some(token) = simd.avx_vnni() {
            return work.run(x86_64::vnni::AvxVnniI8(token));
        }
        if let Some(token) = simd.avx512() {
            return work.run(x86_64::maddubs::Avx512I8(token));
        }
        if let Some(token) = simd.avx2() {
            return work.run(x86_64::maddubs::Avx2I8(token));
        }
    }
    with_float32(simd, work)
}

/// Run `work` with the float32 kernel of a level for an Lp metric.
pub(crate) fn with_minkowski<W: WithKernel>(simd: Simd, metric: Metric, work: W) -> W::Output {
    // The compiler vectorises these kernels: the wide tile pays if vectors have at least eight lanes.
    match (metric == Metric::Chebyshev, simd.avx2().is_some()) {
        (true, true) => work.run(LpF32::<WIDE, true> { simd, metric }),
        (true, false) => work.run(LpF32::<NARROW, true> { simd, metric }),
        (false, true) => work.run(LpF32::<WIDE, false> { simd, metric }),
        (false, false) => work.run(LpF32::<NARROW, false> { simd, metric }),
    }
}

/// For each of four rows, one bit per query, in its first lane: set unless the row's key is proved to be below the query's
/// threshold. Keys are sums over the columns: of `q r` with `PRODUCTS`, else of `-(q - r)^2`, so that the larger is the
/// nearer in both cases. `norms` are those of the rows, and are read with `PRODUCTS` only.
pub(crate) fn unpacked_over<const PRODUCTS: bool>(
    simd: Simd,
    queries: &UnpackedQueries,
    rows: [&[f32]; UNPACKED_ROWS],
    norms: [f32; UNPACKED_ROWS],
) -> [u32; UNPACKED_ROWS] {
    #[cfg(target_arch = "x86_64")]
    {
        if let Some(token) = simd.avx512() {
            return x86_64::avx512::unpacked_over::<PRODUCTS>(token, queries, rows, norms);
        }
        if let Some(token) = simd.avx2() {
            return x86_64::avx2::unpacked_over::<PRODUCTS>(token, queries, rows, norms);
        }
    }
    let _ = simd;
    scalar::unpacked_over::<PRODUCTS>(queries, rows, norms)
}
