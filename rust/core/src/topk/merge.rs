//! Merging sorted neighbours of two parts of the references.

use crate::order::Neighbour;

/// Let `found` take its places among `places`; both are in the total order, and only so many places are there.
pub(crate) fn merge(places: &mut [Neighbour], found: &[Neighbour]) {
    // How many of each stay: the first so many of both together.
    let (mut kept, mut taken) = (0, 0);
    while kept + taken < places.len() {
        if taken < found.len() && found[taken] < places[kept] {
            taken += 1;
        } else {
            kept += 1;
        }
    }
    // From the back, so that nothing is overwritten before it has moved.
    for at in (0..places.len()).rev() {
        if taken == 0 {
            break;
        }
        if kept > 0 && places[kept - 1] > found[taken - 1] {
            kept -= 1;
            places[at] = places[kept];
        } else {
            taken -= 1;
            places[at] = found[taken];
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::metric::Metric;

    #[test]
    fn the_first_of_both_stay_in_order() {
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
