//! Kernels written with x86-64 intrinsics.

pub(crate) mod avx2_f32;
pub(crate) mod avx512_f32;
