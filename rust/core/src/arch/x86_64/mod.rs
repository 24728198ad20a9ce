//! x86-64: vectors and kernels of each instruction set, reached through the token that proves it.

pub(crate) mod avx2;
pub(crate) mod avx512;
pub(crate) mod vnni;
