//! x86-64: the vectors and kernels of each instruction set, used through the token that proves it.

/// Methods of a token that are one intrinsic each. The token must prove the features of the intrinsics it is used with.
macro_rules! intrinsics {
    ($(fn $name:ident($($x:ident: $from:ty),*) -> $to:ty = $intrinsic:ident;)*) => {$(
        #[inline(always)]
        fn $name(self, $($x: $from),*) -> $to {
            // SAFETY: `self` proves the features of the intrinsic.
            unsafe { $intrinsic($($x),*) }
        }
    )*};
}

pub(crate) mod avx2;
pub(crate) mod avx512;
pub(crate) mod maddubs;
pub(crate) mod vnni;
