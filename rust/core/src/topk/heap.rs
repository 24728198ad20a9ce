//! The k first neighbours seen so far, under the total order.

use std::collections::BinaryHeap;

use crate::order::Neighbour;

/// At most `k` neighbours; the worst is on top.
#[derive(Debug, Clone)]
pub(crate) struct Heap {
    k: usize,
    heap: BinaryHeap<Neighbour>,
}

impl Heap {
    pub(crate) fn new(k: usize) -> Self {
        Self { k, heap: BinaryHeap::new() }
    }

    /// Keep `neighbour` if it belongs to the first k.
    #[inline]
    pub(crate) fn push(&mut self, neighbour: Neighbour) {
        if self.heap.len() < self.k {
            self.heap.push(neighbour);
        } else if let Some(mut worst) = self.heap.peek_mut()
            && neighbour < *worst
        {
            *worst = neighbour;
        }
    }

    /// The k-th neighbour, once there are k.
    #[inline]
    pub(crate) fn worst(&self) -> Option<Neighbour> {
        if self.heap.len() == self.k { self.heap.peek().copied() } else { None }
    }

    /// Take in everything another heap holds.
    pub(crate) fn merge(&mut self, other: Self) {
        for neighbour in other.heap {
            self.push(neighbour);
        }
    }

    /// Nearest first.
    pub(crate) fn into_sorted(self) -> Vec<Neighbour> {
        let mut sorted = self.heap.into_vec();
        sorted.sort_unstable();
        sorted
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::metric::Metric;

    #[test]
    fn keeps_the_first_k_under_ties() {
        let mut heap = Heap::new(3);
        for (value, row) in [(2.0, 0), (1.0, 9), (1.0, 4), (1.0, 7), (3.0, 1), (1.0, 5)] {
            heap.push(Neighbour::new::<f32>(Metric::SqEuclidean, value, row));
        }
        let rows: Vec<u32> = heap.into_sorted().into_iter().map(Neighbour::row).collect();
        assert_eq!(rows, [4, 5, 7]);
    }
}
