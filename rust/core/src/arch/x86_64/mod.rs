//! x86-64 microkernels. Each is reached through a token that proves its instruction set.

pub(crate) mod avx2_f32;
pub(crate) mod avx512_f32;
pub(crate) mod avx512_vnni_i8;
pub(crate) mod avx_vnni_i8;
pub(super) mod unpacked;

use std::arch::x86_64::*;

use crate::arch::kernel::CandidateLists;

/// Report the keys of sixteen neighbouring rows, `first` onwards, whose bit in `over` is set.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
fn report_avx512(candidates: &mut CandidateLists, m: usize, first: u32, over: __mmask16, key: __m512) {
    let lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    let rows = _mm512_add_epi32(_mm512_set1_epi32(first as i32), lanes);
    let (row_tail, key_tail) = candidates.tail(m);
    let row_tail: &mut [u32; 16] = row_tail.try_into().expect("sixteen places");
    let key_tail: &mut [f32; 16] = key_tail.try_into().expect("sixteen places");
    // Compressed in a register, then stored whole: the compressing store is very slow on some CPUs.
    // SAFETY: both tails have room for sixteen numbers.
    unsafe {
        _mm512_storeu_si512(row_tail.as_mut_ptr().cast(), _mm512_maskz_compress_epi32(over, rows));
        _mm512_storeu_ps(key_tail.as_mut_ptr(), _mm512_maskz_compress_ps(over, key));
    }
    candidates.grow(m, over.count_ones() as usize);
}

/// Report the keys of eight neighbouring rows, `first` onwards, whose bit in `over` is set.
#[inline]
#[target_feature(enable = "avx2,fma")]
fn report_avx2(candidates: &mut CandidateLists, m: usize, first: u32, mut over: u32, key: __m256) {
    let mut keys = [0.0f32; 8];
    // SAFETY: `keys` has room for eight numbers.
    unsafe { _mm256_storeu_ps(keys.as_mut_ptr(), key) };
    if over == 0xff {
        let (row_tail, key_tail) = candidates.tail(m);
        for (lane, (row, key)) in row_tail.iter_mut().zip(key_tail).take(8).enumerate() {
            (*row, *key) = (first + lane as u32, keys[lane]);
        }
        candidates.grow(m, 8);
        return;
    }
    while over != 0 {
        let lane = over.trailing_zeros();
        over &= over - 1;
        candidates.push(m, first + lane, keys[lane as usize]);
    }
}
