//! The loop of the fuzz targets: cases from seeds until the time is up.
//!
//! `make fuzz` sets the variables. A case that fails prints its seed, which repeats the case.

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::time::{Duration, Instant, SystemTime};

/// Deterministic numbers without a dependency: splitmix64, and normal deviates as a sum of twelve.
pub struct Random(pub u64);

#[allow(dead_code, reason = "no target uses everything")]
impl Random {
    pub fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    pub fn unit(&mut self) -> f64 {
        (self.bits() >> 11) as f64 / (1u64 << 53) as f64
    }

    pub fn normal(&mut self) -> f64 {
        (0..12).map(|_| self.unit()).sum::<f64>() - 6.0
    }

    pub fn below(&mut self, n: usize) -> usize {
        (self.bits() % n as u64) as usize
    }

    pub fn pick<T: Copy>(&mut self, from: &[T]) -> T {
        from[self.below(from.len())]
    }
}

fn variable(name: &str) -> Option<u64> {
    std::env::var(name).ok().map(|text| text.parse().expect("a number"))
}

fn checked(target: &str, seed: u64, case: impl Fn(u64) -> u64) -> u64 {
    catch_unwind(AssertUnwindSafe(|| case(seed))).unwrap_or_else(|panic| {
        eprintln!("FAILED: python -m tests.fuzz --target {target} --seed {seed}");
        resume_unwind(panic)
    })
}

/// Run `case`, which returns the number of its checks, with the seed of `EXACTKNN_FUZZ_SEED`, or with new seeds for
/// `EXACTKNN_FUZZ_SECONDS`.
pub fn fuzz(target: &str, case: impl Fn(u64) -> u64) {
    let (start, mut cases, mut checks) = (Instant::now(), 0u64, 0u64);
    if let Some(seed) = variable("EXACTKNN_FUZZ_SEED") {
        (cases, checks) = (1, checked(target, seed, &case));
    } else {
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).expect("after 1970");
        let mut seeds = Random(now.as_nanos() as u64);
        let time = Duration::from_secs(variable("EXACTKNN_FUZZ_SECONDS").unwrap_or(1));
        while start.elapsed() < time {
            checks += checked(target, seeds.bits(), &case);
            cases += 1;
        }
    }
    println!("FUZZED {target} {cases} {checks} {:.0}", start.elapsed().as_secs_f64());
}

/// Run `case` with seeds that failed once, and with the first `more` seeds.
pub fn replay(target: &str, failed_once: &[u64], more: u64, case: impl Fn(u64) -> u64) {
    for seed in failed_once.iter().copied().chain(0..more) {
        assert!(checked(target, seed, &case) > 0, "seed {seed} checks nothing");
    }
}
