//! Peak rates of the machine and of the kernels, for benchmarks. No search uses this module.
//!
//! A *peak* is the rate of independent multiply-add instructions without memory access. A *tile* is the rate of a kernel as
//! called by a search: one panel of queries, panels of references in the second-level cache, no candidates.

use std::hint::black_box;
use std::time::{Duration, Instant};

use crate::arch::kernel::{CandidateLists, Microkernel, QueryPanel, Thresholds, Visit};
use crate::arch::level::Simd;
use crate::arch::{self, WithKernel};
use crate::error::{Argument, Error, Result};
use crate::filter::frame::Frame;
use crate::filter::panels::{PackedQuery, PackedReference};
use crate::matrix::MatrixRef;
use crate::metric::Metric;
use crate::runtime::Monitor;
use crate::search::plan;

/// The type of the codes that a kernel multiplies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Codes {
    /// 8-bit integers.
    Int8,
    /// Float32 numbers.
    Float32,
}

/// Repetitions of a measurement, of which the fastest is used, and the time of each.
const ROUNDS: usize = 7;
const ROUND: Duration = Duration::from_millis(20);

/// Operations per second (a multiply-add is two) of `run`, which returns its number of operations.
fn rate(mut run: impl FnMut() -> f64) -> f64 {
    (0..ROUNDS)
        .map(|_| {
            let (start, mut done) = (Instant::now(), 0.0);
            while start.elapsed() < ROUND {
                done += run();
            }
            done / start.elapsed().as_secs_f64()
        })
        .fold(0.0, f64::max)
}

/// Operations per second of the multiply-add instructions of one thread; `None` if the level has none of its own.
pub fn peak(simd: Simd, codes: Codes) -> Option<f64> {
    #[cfg(target_arch = "x86_64")]
    {
        use std::arch::x86_64::*;

        /// Chains that hide the latency of two instructions a cycle.
        const CHAINS: usize = 12;
        const TURNS: usize = 4096;

        macro_rules! chains {
            ($features:literal, $zero:expr, $step:expr) => {{
                #[target_feature(enable = $features)]
                fn run() {
                    let (x, y) = black_box(($zero, $zero));
                    let mut sums = [$zero; CHAINS];
                    for _ in 0..TURNS {
                        for sum in &mut sums {
                            *sum = $step(*sum, x, y);
                        }
                    }
                    black_box(sums);
                }
                run
            }};
        }
        let of = |lanes: usize| (2 * lanes * CHAINS * TURNS) as f64;
        match codes {
            Codes::Int8 if simd.avx512_vnni().is_some() => {
                let run = chains!("avx512f,avx512vnni", _mm512_setzero_si512(), _mm512_dpbusd_epi32);
                return Some(rate(|| {
                    // SAFETY: the guard of this arm has a token that proves AVX-512 F and VNNI.
                    unsafe { run() };
                    of(64)
                }));
            }
            Codes::Int8 if simd.avx_vnni().is_some() => {
                let run = chains!("avx2,avxvnni", _mm256_setzero_si256(), _mm256_dpbusd_avx_epi32);
                return Some(rate(|| {
                    // SAFETY: the guard of this arm has a token that proves AVX2 and AVX-VNNI.
                    unsafe { run() };
                    of(32)
                }));
            }
            Codes::Int8 if simd.avx512().is_some() => {
                // The products depend on the sum, or they would leave the loop.
                let run = chains!("avx512f,avx512bw", _mm512_setzero_si512(), |sum, x, y| _mm512_add_epi32(
                    sum,
                    _mm512_madd_epi16(_mm512_maddubs_epi16(sum, x), y)
                ));
                return Some(rate(|| {
                    // SAFETY: the guard of this arm has a token that proves AVX-512 F and BW.
                    unsafe { run() };
                    of(64)
                }));
            }
            Codes::Int8 if simd.avx2().is_some() => {
                let run = chains!("avx2", _mm256_setzero_si256(), |sum, x, y| _mm256_add_epi32(
                    sum,
                    _mm256_madd_epi16(_mm256_maddubs_epi16(sum, x), y)
                ));
                return Some(rate(|| {
                    // SAFETY: the guard of this arm has a token that proves AVX2.
                    unsafe { run() };
                    of(32)
                }));
            }
            Codes::Float32 if simd.avx512().is_some() => {
                let run = chains!("avx512f", _mm512_setzero_ps(), |sum, x, y| _mm512_fmadd_ps(x, y, sum));
                return Some(rate(|| {
                    // SAFETY: the guard of this arm has a token that proves AVX-512 F.
                    unsafe { run() };
                    of(16)
                }));
            }
            Codes::Float32 if simd.avx2().is_some() => {
                let run = chains!("avx2,fma", _mm256_setzero_ps(), |sum, x, y| _mm256_fmadd_ps(x, y, sum));
                return Some(rate(|| {
                    // SAFETY: the guard of this arm has a token that proves AVX2 and FMA.
                    unsafe { run() };
                    of(8)
                }));
            }
            _ => {}
        }
    }
    let _ = (simd, codes);
    None
}

struct Tile {
    simd: Simd,
    dim: usize,
}

/// A call of a kernel; returns its number of operations.
pub type Call = Box<dyn FnMut() -> f64>;

impl WithKernel for Tile {
    type Output = Result<Call>;

    fn run<K: Microkernel + 'static>(self, kernel: K) -> Result<Call> {
        let Self { simd, dim } = self;
        let panel_bytes = dim.div_ceil(K::COLUMNS) * K::NR * size_of::<K::Code>();
        let panels = plan::block_panels(panel_bytes);
        let rows = panels * K::NR;
        let data: Vec<f32> = (0..rows * dim).map(|i| ((i * 7919) % 1009) as f32 / 504.0 - 1.0).collect();
        let reference = MatrixRef::new(&data, rows, dim, Argument::Reference)?;
        let frame = Frame::choose(simd, Metric::SqEuclidean, &reference).expect("memory");
        let packed = PackedReference::<K>::pack(simd, &frame, &reference, 1, &Monitor::new())?;
        let queries: Vec<u32> = (0..K::MR as u32).collect();
        let query = PackedQuery::<K>::pack(simd, &frame, &reference, &queries)?;
        let mut thresholds = Thresholds::closed();
        for m in 0..K::MR {
            thresholds.open(m, f32::MAX, query.terms[m]);
        }
        let mut candidates = CandidateLists::new(K::MR, K::NR).expect("memory");
        Ok(Box::new(move || {
            let panel = QueryPanel { codes: query.panel(0), thresholds: &thresholds };
            kernel.scan(
                &panel,
                &packed.run(0, panels, Visit::All).expect("codes in memory need no verification"),
                &mut candidates,
            );
            (2 * K::MR * rows * dim) as f64
        }))
    }
}

/// The microkernel of a level for rows of `dim` columns, ready to be called.
///
/// # Errors
/// [`crate::Error::OutOfMemory`], [`crate::Error::NoColumns`].
pub fn kernel(simd: Simd, codes: Codes, dim: usize) -> Result<Call> {
    if dim == 0 {
        return Err(Error::NoColumns(Argument::Reference));
    }
    match codes {
        Codes::Int8 => arch::with_int8(simd, Tile { simd, dim }),
        Codes::Float32 => arch::with_float32(simd, Tile { simd, dim }),
    }
}

/// Operations per second of one thread in [`kernel`].
///
/// # Errors
/// As for [`kernel`].
pub fn tile(simd: Simd, codes: Codes, dim: usize) -> Result<f64> {
    kernel(simd, codes, dim).map(rate)
}

/// Whether a level has an int8 kernel.
pub fn has_int8(simd: Simd) -> bool {
    arch::has_int8(simd.level())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::arch::level::Level;

    #[test]
    fn every_kernel_is_measured_and_peaks_are_those_of_its_instructions() {
        for simd in Level::available().into_iter().filter_map(Simd::new) {
            assert_eq!(peak(simd, Codes::Int8).is_some(), has_int8(simd));
            assert_eq!(peak(simd, Codes::Float32).is_some(), simd.level() != Level::Scalar);
            for codes in [Codes::Int8, Codes::Float32] {
                let mut call = kernel(simd, codes, 33).expect("memory");
                assert!(call() > 0.0);
            }
        }
    }
}
