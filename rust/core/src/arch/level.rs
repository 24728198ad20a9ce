//! SIMD levels: detected, overridable by name, proved by a token.
//!
//! ```text
//! Features::detect() ──> Level::available() ────┐
//! EXACTKNN_SIMD / set_level(name) ──────────────┴──> Simd ──> tokens: Avx2, Avx512, ...
//! ```
//!
//! A value of [`Simd`] or of a token exists only if the CPU has the features. Unsafe code that uses an instruction set takes
//! a token, never a [`Level`]: then its safety does not depend on the caller.

use std::sync::atomic::{AtomicU8, Ordering};

use crate::error::{Error, Result};

/// A set of CPU features. Each constant includes the features that its instructions imply.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Features(u16);

impl Features {
    const NONE: Self = Self(0);
    /// AVX2, FMA and F16C.
    pub(super) const AVX2: Self = Self(1);
    /// [`Features::AVX2`] and AVX-VNNI.
    pub(super) const AVX_VNNI: Self = Self((1 << 1) | Self::AVX2.0);
    /// [`Features::AVX2`] and AVX-512 F, BW, DQ and VL.
    pub(super) const AVX512: Self = Self((1 << 2) | Self::AVX2.0);
    /// [`Features::AVX512`] and AVX-512 VNNI.
    pub(super) const AVX512_VNNI: Self = Self((1 << 3) | Self::AVX512.0);

    pub(super) const fn contains(self, other: Self) -> bool {
        self.0 & other.0 == other.0
    }

    /// The features of this CPU.
    fn detect() -> Self {
        #[cfg_attr(not(target_arch = "x86_64"), allow(unused_mut))]
        let mut found = Self::NONE;
        #[cfg(target_arch = "x86_64")]
        {
            if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") && is_x86_feature_detected!("f16c") {
                found.0 |= Self::AVX2.0;
            }
            if found.contains(Self::AVX2) && is_x86_feature_detected!("avxvnni") {
                found.0 |= Self::AVX_VNNI.0;
            }
            if found.contains(Self::AVX2)
                && is_x86_feature_detected!("avx512f")
                && is_x86_feature_detected!("avx512bw")
                && is_x86_feature_detected!("avx512dq")
                && is_x86_feature_detected!("avx512vl")
            {
                found.0 |= Self::AVX512.0;
            }
            if found.contains(Self::AVX512) && is_x86_feature_detected!("avx512vnni") {
                found.0 |= Self::AVX512_VNNI.0;
            }
        }
        found
    }
}

/// An instruction set with kernels of its own. A level is a set of features and levels have no order: a level need not
/// include the levels before it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
#[repr(u8)]
pub enum Level {
    /// Plain Rust: the features of the compilation target.
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
    /// All levels, slowest first, available on this CPU or not.
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

    /// The features of the level.
    pub(super) const fn features(self) -> Features {
        match self {
            Self::Scalar => Features::NONE,
            Self::Avx2 => Features::AVX2,
            Self::AvxVnni => Features::AVX_VNNI,
            Self::Avx512 => Features::AVX512,
            // Without AVX-VNNI: a CPU with AVX-512 VNNI need not have it.
            Self::Avx512Vnni => Features::AVX512_VNNI,
        }
    }

    /// Whether this CPU can run the level. It never changes within a process.
    pub fn is_available(self) -> bool {
        Features::detect().contains(self.features())
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
pub struct Simd {
    level: Level,
    /// `level.features()`, stored so that getting a token is one bit test.
    features: Features,
}

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
    /// The proof, if this CPU has the level.
    pub fn new(level: Level) -> Option<Self> {
        level.is_available().then(|| Self::proved(level))
    }

    /// The proof of a level that is known to be available.
    const fn proved(level: Level) -> Self {
        Self { level, features: level.features() }
    }

    /// The level that is proved.
    pub fn level(self) -> Level {
        self.level
    }

    /// A token for AVX2 kernels, if this level includes AVX2.
    pub fn avx2(self) -> Option<Avx2> {
        self.features.contains(Features::AVX2).then_some(Avx2(()))
    }

    /// A token for AVX-VNNI kernels, if this level includes AVX-VNNI.
    pub fn avx_vnni(self) -> Option<AvxVnni> {
        self.features.contains(Features::AVX_VNNI).then_some(AvxVnni(()))
    }

    /// A token for AVX-512 VNNI kernels, if this level includes AVX-512 VNNI.
    pub fn avx512_vnni(self) -> Option<Avx512Vnni> {
        self.features.contains(Features::AVX512_VNNI).then_some(Avx512Vnni(()))
    }

    /// A token for AVX-512 kernels, if this level includes AVX-512.
    pub fn avx512(self) -> Option<Avx512> {
        self.features.contains(Features::AVX512).then_some(Avx512(()))
    }
}

impl AvxVnni {
    /// The token of the features that AVX-VNNI implies.
    pub fn avx2(self) -> Avx2 {
        Avx2(())
    }
}

impl Avx512Vnni {
    /// The token of the features that AVX-512 VNNI implies.
    pub fn avx512(self) -> Avx512 {
        Avx512(())
    }
}

/// The level set by [`set_level`]; 0 if none is set.
static CHOSEN: AtomicU8 = AtomicU8::new(0);

/// The environment variable that selects a level.
pub const LEVEL_VARIABLE: &str = "EXACTKNN_SIMD";

/// The level of new searches: the one set by [`set_level`], else the one named by `EXACTKNN_SIMD`, else the best.
///
/// # Errors
/// [`Error::UnavailableLevel`] if the environment names a level that does not exist or that this CPU lacks.
pub fn active() -> Result<Simd> {
    let chosen = CHOSEN.load(Ordering::Relaxed);
    if let Some(level) = Level::ALL.into_iter().find(|&level| level as u8 == chosen) {
        return Ok(Simd::proved(level));
    }
    match std::env::var(LEVEL_VARIABLE) {
        Ok(name) if !name.is_empty() => {
            Level::parse(&name, " from the environment variable EXACTKNN_SIMD").map(Simd::proved)
        }
        _ => Ok(Simd::proved(Level::best())),
    }
}

/// Set the level of new searches by name; `None` resets to the environment or the best.
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

/// Compile one body for every level and select a copy at run time.
///
/// The body is plain Rust without fused operations, so all copies return the same bits and differ in speed only. The first
/// argument of the generated function is a [`Simd`].
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
                    // SAFETY: the token proves that the CPU has the features for which the copy is compiled.
                    return unsafe { avx512 $(::<$($gen),+>)? ($($arg),*) };
                }
                if simd.avx2().is_some() {
                    // SAFETY: the token proves AVX2, FMA and F16C.
                    return unsafe { avx2 $(::<$($gen),+>)? ($($arg),*) };
                }
            }
            let _ = simd;
            body $(::<$($gen),+>)? ($($arg),*)
        }
    };
}
pub(crate) use multiversion;

#[cfg(test)]
mod tests {
    use super::*;

    /// All sets of features, as a future level might have them: a token depends on the set alone.
    #[test]
    fn a_token_needs_its_features() {
        for set in 0..16 {
            // With the last level, so that a comparison of levels would return every token.
            let simd = Simd { level: Level::Avx512Vnni, features: Features(set) };
            let has = |bits| set & bits == bits;
            assert_eq!(simd.avx2().is_some(), has(0b0001), "{set:04b}");
            assert_eq!(simd.avx_vnni().is_some(), has(0b0011), "{set:04b}");
            assert_eq!(simd.avx512().is_some(), has(0b0101), "{set:04b}");
            assert_eq!(simd.avx512_vnni().is_some(), has(0b1101), "{set:04b}");
        }
    }

    #[test]
    fn levels_have_the_tokens_of_their_features() {
        let tokens = Level::ALL.map(|level| {
            let simd = Simd::proved(level);
            let tokens = [
                simd.avx2().is_some(),
                simd.avx_vnni().is_some(),
                simd.avx512().is_some(),
                simd.avx512_vnni().is_some(),
            ];
            (level.name(), tokens.map(u8::from))
        });
        assert_eq!(
            tokens,
            [
                ("scalar", [0, 0, 0, 0]),
                ("avx2", [1, 0, 0, 0]),
                ("avxvnni", [1, 1, 0, 0]),
                ("avx512", [1, 0, 1, 0]),
                ("avx512vnni", [1, 0, 1, 1]),
            ]
        );
    }
}
