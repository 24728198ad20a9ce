//! SIMD levels: found once, overridable by name, proved by a token.
//!
//! ```text
//! CPU features ──detect──> Level::available() ──┐
//! EXACTKNN_SIMD / set_level(name) ──────────────┴──> Simd (holding one proves that the CPU has it)
//! ```
//!
//! Unsafe code that needs an instruction set takes a [`Simd`] (or one of the tokens it yields), never a [`Level`].

use std::sync::atomic::{AtomicU8, Ordering};

use crate::error::{Error, Result};

/// An instruction set that the crate has kernels for, from the most portable to the fastest.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
#[repr(u8)]
pub enum Level {
    /// Plain Rust: whatever the compilation target guarantees.
    Scalar = 1,
    /// x86-64 with AVX2, FMA and F16C.
    Avx2 = 2,
    /// [`Level::Avx2`] with AVX-VNNI: products of 8-bit integers.
    AvxVnni = 3,
    /// x86-64 with AVX-512 F, BW, DQ and VL.
    Avx512 = 4,
    /// [`Level::Avx512`] with AVX-512 VNNI: products of 8-bit integers.
    Avx512Vnni = 5,
}

impl Level {
    /// Every level, slowest first, whether this CPU has it or not.
    pub const ALL: [Self; 5] = [Self::Scalar, Self::Avx2, Self::AvxVnni, Self::Avx512, Self::Avx512Vnni];

    /// The name used by the environment variable and the API.
    pub fn name(self) -> &'static str {
        match self {
            Self::Scalar => "scalar",
            Self::Avx2 => "avx2",
            Self::AvxVnni => "avxvnni",
            Self::Avx512 => "avx512",
            Self::Avx512Vnni => "avx512vnni",
        }
    }

    /// Whether this CPU can run the level. The answer never changes within a process.
    pub fn is_available(self) -> bool {
        match self {
            Self::Scalar => true,
            #[cfg(target_arch = "x86_64")]
            Self::Avx2 => {
                is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") && is_x86_feature_detected!("f16c")
            }
            #[cfg(target_arch = "x86_64")]
            Self::AvxVnni => Self::Avx2.is_available() && is_x86_feature_detected!("avxvnni"),
            #[cfg(target_arch = "x86_64")]
            Self::Avx512Vnni => Self::Avx512.is_available() && is_x86_feature_detected!("avx512vnni"),
            #[cfg(target_arch = "x86_64")]
            Self::Avx512 => {
                Self::Avx2.is_available()
                    && is_x86_feature_detected!("avx512f")
                    && is_x86_feature_detected!("avx512bw")
                    && is_x86_feature_detected!("avx512dq")
                    && is_x86_feature_detected!("avx512vl")
            }
            #[cfg(not(target_arch = "x86_64"))]
            Self::Avx2 | Self::AvxVnni | Self::Avx512 | Self::Avx512Vnni => false,
        }
    }

    /// The levels that this CPU can run, slowest first; never empty.
    pub fn available() -> Vec<Self> {
        Self::ALL.into_iter().filter(|level| level.is_available()).collect()
    }

    fn best() -> Self {
        Self::ALL.into_iter().rev().find(|level| level.is_available()).unwrap_or(Self::Scalar)
    }

    fn parse(name: &str, origin: &'static str) -> Result<Self> {
        Self::ALL.into_iter().find(|level| level.name() == name && level.is_available()).ok_or_else(|| {
            let choices: Vec<_> = Self::available().into_iter().map(Self::name).collect();
            Error::UnavailableLevel { name: name.to_owned(), choices: choices.join(", "), origin }
        })
    }
}

/// Proof that this CPU runs a [`Level`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Simd(Level);

/// Proof of AVX2, FMA and F16C.
#[derive(Debug, Clone, Copy)]
pub struct Avx2(());

/// Proof of AVX2, FMA, F16C and AVX-VNNI.
#[derive(Debug, Clone, Copy)]
pub struct AvxVnni(());

/// Proof of AVX-512 F, BW, DQ and VL.
#[derive(Debug, Clone, Copy)]
pub struct Avx512(());

/// Proof of AVX-512 F, BW, DQ, VL and VNNI.
#[derive(Debug, Clone, Copy)]
pub struct Avx512Vnni(());

impl Simd {
    /// The proof, if the CPU has the level.
    pub fn new(level: Level) -> Option<Self> {
        level.is_available().then_some(Self(level))
    }

    /// The level that is proved.
    pub fn level(self) -> Level {
        self.0
    }

    /// A token for AVX2 kernels, where this level includes AVX2.
    pub fn avx2(self) -> Option<Avx2> {
        (self.0 >= Level::Avx2).then_some(Avx2(()))
    }

    /// A token for AVX-VNNI kernels, at that level alone: a CPU with AVX-512 need not have the shorter form.
    pub fn avx_vnni(self) -> Option<AvxVnni> {
        (self.0 == Level::AvxVnni).then_some(AvxVnni(()))
    }

    /// A token for AVX-512 VNNI kernels, where this level includes them.
    pub fn avx512_vnni(self) -> Option<Avx512Vnni> {
        (self.0 == Level::Avx512Vnni).then_some(Avx512Vnni(()))
    }

    /// A token for AVX-512 kernels, where this level includes AVX-512.
    pub fn avx512(self) -> Option<Avx512> {
        (self.0 >= Level::Avx512).then_some(Avx512(()))
    }
}

/// The level set by [`set_level`]; 0 while none is set.
static CHOSEN: AtomicU8 = AtomicU8::new(0);

/// Name of the environment variable that picks a level.
pub const LEVEL_VARIABLE: &str = "EXACTKNN_SIMD";

/// The level that searches use now: the one set, else the one named by `EXACTKNN_SIMD`, else the best.
///
/// # Errors
/// [`Error::UnavailableLevel`] when the environment names a level that does not exist or that this CPU lacks.
pub fn active() -> Result<Simd> {
    let chosen = CHOSEN.load(Ordering::Relaxed);
    if let Some(level) = Level::ALL.into_iter().find(|&level| level as u8 == chosen) {
        return Ok(Simd(level));
    }
    match std::env::var(LEVEL_VARIABLE) {
        Ok(name) if !name.is_empty() => Level::parse(&name, " from the environment variable EXACTKNN_SIMD").map(Simd),
        _ => Ok(Simd(Level::best())),
    }
}

/// Make searches use the level of this name; `None` goes back to the environment or the best.
///
/// # Errors
/// [`Error::UnavailableLevel`] for a name that does not exist or that this CPU lacks.
pub fn set_level(name: Option<&str>) -> Result<()> {
    let chosen = match name {
        Some(name) => Level::parse(name, "")? as u8,
        None => 0,
    };
    CHOSEN.store(chosen, Ordering::Relaxed);
    Ok(())
}

/// Compile one body for every level and choose at run time.
///
/// The body is plain Rust without fused operations, so each copy returns the same bits; only its speed differs. The
/// first argument of the generated function is a [`Simd`].
macro_rules! multiversion {
    ($(#[$meta:meta])* $vis:vis fn $name:ident $(<$($gen:ident : $bound:path),+>)? ($($arg:ident : $ty:ty),* $(,)?) $(-> $ret:ty)? $body:block) => {
        $(#[$meta])*
        $vis fn $name $(<$($gen: $bound),+>)? (simd: $crate::arch::level::Simd, $($arg: $ty),*) $(-> $ret)? {
            #[inline(always)]
            #[allow(clippy::too_many_arguments)]
            fn body $(<$($gen: $bound),+>)? ($($arg: $ty),*) $(-> $ret)? $body

            #[cfg(target_arch = "x86_64")]
            {
                #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
                #[allow(clippy::too_many_arguments)]
                fn avx512 $(<$($gen: $bound),+>)? ($($arg: $ty),*) $(-> $ret)? { body $(::<$($gen),+>)? ($($arg),*) }

                #[target_feature(enable = "avx2,fma,f16c")]
                #[allow(clippy::too_many_arguments)]
                fn avx2 $(<$($gen: $bound),+>)? ($($arg: $ty),*) $(-> $ret)? { body $(::<$($gen),+>)? ($($arg),*) }

                if simd.avx512().is_some() {
                    // SAFETY: the token proves that the CPU has the features that the copy was compiled for.
                    return unsafe { avx512 $(::<$($gen),+>)? ($($arg),*) };
                }
                if simd.avx2().is_some() {
                    // SAFETY: as above.
                    return unsafe { avx2 $(::<$($gen),+>)? ($($arg),*) };
                }
            }
            let _ = simd;
            body $(::<$($gen),+>)? ($($arg),*)
        }
    };
}
pub(crate) use multiversion;
