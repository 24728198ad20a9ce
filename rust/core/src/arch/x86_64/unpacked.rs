//! Sums over the columns of sixteen queries with four rows, for rows that are not packed: see `filter/unpacked.rs`.

use std::arch::x86_64::*;

use crate::arch::{UNPACKED_LANES, UNPACKED_ROWS, UnpackedSums};

/// With `PRODUCTS` sums of `q r`, else sums of `-(q - r)^2`.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
pub(in crate::arch) fn avx512<const PRODUCTS: bool>(
    columns: &[[f32; UNPACKED_LANES]],
    rows: [&[f32]; UNPACKED_ROWS],
) -> UnpackedSums {
    let mut sums = [_mm512_setzero_ps(); UNPACKED_ROWS];
    let [a, b, c, d] = rows;
    for ((((column, a), b), c), d) in columns.iter().zip(a).zip(b).zip(c).zip(d) {
        // SAFETY: a column has sixteen numbers.
        let q = unsafe { _mm512_loadu_ps(column.as_ptr()) };
        for (sum, x) in sums.iter_mut().zip([a, b, c, d]) {
            let x = _mm512_set1_ps(*x);
            *sum = if PRODUCTS {
                _mm512_fmadd_ps(q, x, *sum)
            } else {
                let difference = _mm512_sub_ps(q, x);
                _mm512_fnmadd_ps(difference, difference, *sum)
            };
        }
    }
    let mut stored = [[0.0; UNPACKED_LANES]; UNPACKED_ROWS];
    for (sum, stored) in sums.into_iter().zip(&mut stored) {
        // SAFETY: there is room for sixteen numbers.
        unsafe { _mm512_storeu_ps(stored.as_mut_ptr(), sum) };
    }
    stored
}

/// As [`avx512`], in halves of eight queries.
#[target_feature(enable = "avx2,fma")]
pub(in crate::arch) fn avx2<const PRODUCTS: bool>(
    columns: &[[f32; UNPACKED_LANES]],
    rows: [&[f32]; UNPACKED_ROWS],
) -> UnpackedSums {
    let mut sums = [[_mm256_setzero_ps(); 2]; UNPACKED_ROWS];
    let [a, b, c, d] = rows;
    for ((((column, a), b), c), d) in columns.iter().zip(a).zip(b).zip(c).zip(d) {
        // SAFETY: a column has sixteen numbers.
        let q = unsafe { [_mm256_loadu_ps(column.as_ptr()), _mm256_loadu_ps(column.as_ptr().add(8))] };
        for (sum, x) in sums.iter_mut().zip([a, b, c, d]) {
            let x = _mm256_set1_ps(*x);
            for half in 0..2 {
                sum[half] = if PRODUCTS {
                    _mm256_fmadd_ps(q[half], x, sum[half])
                } else {
                    let difference = _mm256_sub_ps(q[half], x);
                    _mm256_fnmadd_ps(difference, difference, sum[half])
                };
            }
        }
    }
    let mut stored = [[0.0; UNPACKED_LANES]; UNPACKED_ROWS];
    for (sum, stored) in sums.into_iter().zip(&mut stored) {
        let (low, high) = stored.split_at_mut(8);
        // SAFETY: there is room for eight numbers in each.
        unsafe {
            _mm256_storeu_ps(low.as_mut_ptr(), sum[0]);
            _mm256_storeu_ps(high.as_mut_ptr(), sum[1]);
        }
    }
    stored
}
