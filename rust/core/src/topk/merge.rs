//! Merging the sorted neighbours from two blocks of references.

use crate::order::Neighbour;

/// Merge `found` into `places`, whose length stays: both are in the total order, and the last neighbours drop out.
pub(crate) fn merge(places: &mut [Neighbour], found: &[Neighbour]) {
    // First count how many of each list are among the first `places.len()` of both.
    let (mut old, mut new) = (0, 0);
    while old + new < places.len() {
        if new < found.len() && found[new] < places[old] {
            new += 1;
        } else {
            old += 1;
        }
    }
    // Fill from the back: a place is overwritten only after its neighbour has moved.
    for at in (0..places.len()).rev() {
        if new == 0 {
            break;
        }
        if old > 0 && places[old - 1] > found[new - 1] {
            old -= 1;
            places[at] = places[old];
        } else {
            new -= 1;
            places[at] = found[new];
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::metric::Metric;

    #[test]
    fn the_first_of_both_lists_remain_in_order() {
        let at = |&(value, row): &(f64, u32)| Neighbour::new::<f32>(Metric::SqEuclidean, value, row);
        let lists: [&[(f64, u32)]; 6] = [
            &[],
            &[(1.0, 0)],
            &[(1.0, 3), (1.0, 5), (2.0, 1)],
            &[(0.5, 7), (1.0, 4), (3.0, 2)],
            &[(4.0, 8), (5.0, 9), (6.0, 6)],
            &[(0.0, 10), (0.1, 11), (0.2, 12)],
        ];
        for left in lists {
            for right in lists {
                for k in 1..8 {
                    let mut places: Vec<Neighbour> = left.iter().map(at).collect();
                    places.resize(k.max(left.len()), Neighbour::EMPTY);
                    places.truncate(k);
                    let found: Vec<Neighbour> = right.iter().map(at).collect();
                    let mut all = [places.clone(), found.clone()].concat();
                    all.sort();
                    all.truncate(k);
                    merge(&mut places, &found);
                    assert_eq!(places, all);
                }
            }
        }
    }
}
