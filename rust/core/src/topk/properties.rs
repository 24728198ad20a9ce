//! The fuzz target of selection: any sequence of additions, selections and merges gives what sorting gives.

use super::{TopK, merge};
use crate::fuzz::{Random, fuzz, replay};
use crate::metric::Metric;
use crate::order::Neighbour;
use crate::runtime::Monitor;

const TARGET: &str = "selection";
/// Seeds that failed once.
const FAILED_ONCE: [u64; 0] = [];

/// Neighbours with many ties, of one kind of numbers.
fn neighbours(count: usize, random: &mut Random) -> Vec<Neighbour> {
    let metric = random.pick(&[Metric::SqEuclidean, Metric::InnerProduct, Metric::Cosine]);
    let (distinct, scale) = (1 + random.below(2 * count + 1), random.pick(&[1e-300, 1e-60, 1e-40, 1.0, 1e30, 1e200]));
    let (single, by_row) = (random.below(2) == 0, random.below(2) == 0);
    let mut all: Vec<Neighbour> = (0..count as u32)
        .map(|row| {
            let value = (random.below(distinct) as f64 - distinct as f64 / 3.0) * scale;
            if single { Neighbour::new::<f32>(metric, value, row) } else { Neighbour::new::<f64>(metric, value, row) }
        })
        .collect();
    if !by_row {
        for i in (1..count).rev() {
            all.swap(i, random.below(i + 1));
        }
    }
    all
}

fn sorted(nearest: TopK) -> Vec<Neighbour> {
    let mut found = Vec::new();
    nearest.sorted(&Monitor::new(), |neighbour| found.push(neighbour)).expect("memory");
    found
}

fn assert_same(found: &[Neighbour], wanted: &[Neighbour]) {
    let parts = |all: &[Neighbour]| -> Vec<(u64, u32)> {
        all.iter().map(|neighbour| (neighbour.parts().0.to_bits(), neighbour.row())).collect()
    };
    assert_eq!(parts(found), parts(wanted));
}

fn case(seed: u64) -> u64 {
    let random = &mut Random(seed);
    let most = random.pick(&[20, 300, 20_000]);
    let count = 1 + random.below(most);
    let all = neighbours(count, random);
    let k = if random.below(3) == 0 { 1 + random.below(count) } else { 1 + random.below(count.min(40)) };
    let mut wanted = all.clone();
    wanted.sort_by(|x, y| x.parts().0.total_cmp(&y.parts().0).then(x.row().cmp(&y.row())));
    wanted.truncate(k);

    // Several buffers, merged in any order, some of them with a threshold that all first k pass.
    let parts = 1 + random.below(4);
    let fresh = |_| TopK::new(k, count).expect("memory");
    let mut buffers: Vec<TopK> = (0..parts).map(fresh).collect();
    let select_in = 1 + random.below(50);
    for &neighbour in &all {
        let buffer = &mut buffers[random.below(parts)];
        buffer.push(neighbour);
        if random.below(select_in) == 0 && buffer.should_select() {
            buffer.select();
        }
    }
    let sorted_parts: Vec<Vec<Neighbour>> = buffers.iter().map(|buffer| sorted(buffer.clone())).collect();
    let mut merged = buffers.swap_remove(random.below(parts));
    for buffer in buffers {
        merged.merge(buffer).expect("memory");
    }
    assert_eq!(merged.len(), wanted.len());
    assert_same(&sorted(merged), &wanted);

    // The same from sorted lists.
    let mut places = vec![Neighbour::EMPTY; k];
    for found in &sorted_parts {
        merge(&mut places, found);
    }
    places.retain(|neighbour| neighbour.row() != Neighbour::EMPTY.row());
    assert_same(&places, &wanted);

    // The same with a threshold: the neighbours strictly before it.
    let threshold = all[random.below(count)];
    let mut limited = TopK::with_threshold(Some(threshold), k, count).expect("memory");
    all.iter().for_each(|&neighbour| limited.push(neighbour));
    let before: Vec<Neighbour> = wanted.iter().copied().take_while(|neighbour| *neighbour < threshold).collect();
    assert_same(&sorted(limited), &before);
    count as u64
}

#[test]
fn seeds_are_selected_like_sorted() {
    replay(TARGET, &FAILED_ONCE, 200, case);
}

#[test]
#[ignore = "runs for as long as it is told to: make fuzz"]
fn fuzz_selection() {
    fuzz(TARGET, case);
}
