//! The microkernels, one file for each level and kind of code.

pub(crate) mod lp_f32;
pub(crate) mod scalar;
#[cfg(target_arch = "x86_64")]
pub(crate) mod x86_64;
