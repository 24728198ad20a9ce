//! The collector of `knn.rs` and `symmetric.rs`: the k nearest neighbours so far of each query of a chunk.
//!
//! ```text
//! float64 values ──> TopK of each query ──k-th value──Bound──> reject_below, which never falls
//!                    └──write──> values and rows, or the nearest so far (incremental.rs)
//! ```

use super::scan::{Collector, Pass};
use crate::error::{Error, Result};
use crate::filter::bound::Bound;
use crate::matrix::{Output, Values};
use crate::order::{Neighbour, Ranking};
use crate::runtime::Monitor;
use crate::runtime::alloc::try_vec;
use crate::topk::{self, TopK};

/// The output of some queries, `k` places each.
pub(crate) enum Out<'a> {
    /// The result of the search: every query has `k` neighbours.
    Answer(Values<'a>, &'a mut [i64]),
    /// The sorted neighbours from earlier blocks of references, to be merged with those of this block; see `incremental.rs`.
    SoFar(&'a mut [Neighbour]),
}

impl Out<'_> {
    /// The first `middle` places and the rest.
    pub(crate) fn split_at(self, middle: usize) -> (Self, Self) {
        match self {
            Self::Answer(values, rows) => {
                let ((values, more_values), (rows, more_rows)) = (values.split_at(middle), rows.split_at_mut(middle));
                (Self::Answer(values, rows), Self::Answer(more_values, more_rows))
            }
            Self::SoFar(places) => {
                let (places, more) = places.split_at_mut(middle);
                (Self::SoFar(places), Self::SoFar(more))
            }
        }
    }
}

/// The candidates and the floor of one query.
pub(crate) struct State {
    nearest: TopK,
    /// See [`Collector::reject_below`]. This is where a query's floor is kept; scans work on short-lived copies.
    reject_below: f32,
    /// Converts values to floors; `None` if there are no keys.
    bound: Option<Bound>,
}

impl State {
    /// Select if that pays, and raise the floor if the k-th neighbour is no longer `before`.
    #[inline(always)]
    fn settle(&mut self, ranking: Ranking, before: Option<Neighbour>) {
        // Without keys there is no floor to raise: candidates stay in the order of their rows, which saves the sort half of its
        // passes, and `push` selects when the buffer is full.
        if self.bound.is_some() && self.nearest.should_select() {
            self.nearest.select();
        }
        self.raise_floor(ranking, before);
    }

    /// Raise the floor if the k-th neighbour is no longer `before`.
    #[inline(always)]
    fn raise_floor(&mut self, ranking: Ranking, before: Option<Neighbour>) {
        if let (Some(bound), Some(kth)) = (&self.bound, self.nearest.kth().filter(|now| Some(*now) != before)) {
            self.reject_below = self.reject_below.max(bound.reject_below(ranking.value(kth)));
        }
    }

    /// Set the threshold to the last neighbour of the sample, which is expected behind rank `k` of all. If the sample had too
    /// few rows, the query keeps fewer than `k` candidates and is searched again.
    fn expect(&mut self, ranking: Ranking, k: usize, most: usize) -> Result<()> {
        self.nearest.select();
        if let Some(last) = self.nearest.kth() {
            let found = std::mem::replace(&mut self.nearest, TopK::new(1, 1)?);
            self.nearest = TopK::resume(k, most, found, last)?;
            if let Some(bound) = &self.bound {
                self.reject_below = bound.reject_below(ranking.value(last));
            }
        }
        Ok(())
    }
}

/// See the module header.
pub(crate) struct KnnCollector {
    ranking: Ranking,
    states: Vec<State>,
}

impl KnnCollector {
    /// A collector for the first `k` of the references of a pass.
    /// - `initial`: the initial threshold of a query, numbered as in the search
    /// - `most`: the most references that are scanned
    pub(crate) fn new(
        pass: &Pass<'_>,
        ranking: Ranking,
        initial: impl Fn(u32) -> Option<Neighbour>,
        k: usize,
        most: usize,
    ) -> Result<Self> {
        let mut states = try_vec(pass.queries().len(), "candidates")?;
        for (i, &query) in pass.queries().iter().enumerate() {
            let initial = initial(query);
            let bound = pass.key_map(i).map(|keys| keys.bound(ranking.unit_roundoff()));
            let mut state =
                State { nearest: TopK::with_threshold(initial, k, most)?, reject_below: f32::NEG_INFINITY, bound };
            state.raise_floor(ranking, None);
            states.push(state);
        }
        Ok(Self { ranking, states })
    }

    /// Write the `k` nearest of each query; `first_reference` is the number of row 0.
    pub(crate) fn write(self, k: usize, first_reference: usize, out: Out<'_>, monitor: &Monitor) -> Result<()> {
        match out {
            // One loop for each type of results: the values of a large `k` are stored at the speed of memory.
            Out::Answer(Values::Single(values), rows) => self.write_to(k, values, rows, monitor)?,
            Out::Answer(Values::Double(values), rows) => self.write_to(k, values, rows, monitor)?,
            Out::SoFar(places) => {
                let mut scratch = try_vec(k, "the neighbours")?;
                for (state, places) in self.states.into_iter().zip(places.chunks_mut(k)) {
                    scratch.clear();
                    state.nearest.sorted(monitor, |neighbour| scratch.push(neighbour.offset_by(first_reference)))?;
                    topk::merge(places, &scratch);
                }
            }
        }
        Ok(())
    }

    fn write_to<O: Output>(self, k: usize, values: &mut [O], rows: &mut [i64], monitor: &Monitor) -> Result<()> {
        for ((state, values), rows) in self.states.into_iter().zip(values.chunks_mut(k)).zip(rows.chunks_mut(k)) {
            if state.nearest.len() < k {
                return Err(Error::Panic("a query found too few neighbours".into()));
            }
            let mut places = values.iter_mut().zip(rows);
            state.nearest.sorted(monitor, |neighbour| {
                if let Some((value, row)) = places.next() {
                    *value = O::round(self.ranking.value(neighbour));
                    *row = i64::from(neighbour.row());
                }
            })?;
        }
        Ok(())
    }

    /// Number of queries.
    pub(crate) fn queries(&self) -> usize {
        self.states.len()
    }

    /// The floor of each query.
    pub(crate) fn floors(&self) -> impl Iterator<Item = f32> {
        self.states.iter().map(|state| state.reject_below)
    }

    /// End the sample: see [`State::expect`]. `most` is the number of all references.
    pub(crate) fn expect(&mut self, k: usize, most: usize) -> Result<()> {
        self.states.iter_mut().try_for_each(|state| state.expect(self.ranking, k, most))
    }

    /// The queries with fewer than `k` candidates.
    pub(crate) fn short_of(&self, k: usize) -> Result<Vec<usize>> {
        let short = || (0..self.states.len()).filter(|&i| self.states[i].nearest.len() < k);
        let mut queries = try_vec(short().count(), "candidates")?;
        queries.extend(short());
        Ok(queries)
    }

    /// Replace the candidates of the numbered queries by those of another collector.
    pub(crate) fn replace(&mut self, queries: &[usize], by: Self) {
        for (&query, state) in queries.iter().zip(by.states) {
            self.states[query] = state;
        }
    }

    /// Enter values of pairs (query, value, row), then raise all floors.
    pub(crate) fn enter(&mut self, pairs: impl Iterator<Item = (usize, f64, u32)>) {
        for (query, value, row) in pairs {
            self.states[query].nearest.push(self.ranking.neighbour(value, row));
        }
        self.states.iter_mut().for_each(|state| state.settle(self.ranking, None));
    }
}

impl Collector for KnnCollector {
    fn reject_below(&self, query: usize) -> f32 {
        self.states[query].reject_below
    }

    fn rises(&self) -> bool {
        true
    }

    fn take(&mut self, query: usize, rows: &[u32], values: &[f64]) -> Result<u64> {
        let (ranking, state) = (self.ranking, &mut self.states[query]);
        let kth = state.nearest.kth();
        let mut false_positives = 0;
        for (&row, &value) in rows.iter().zip(values) {
            let neighbour = ranking.neighbour(value, row);
            false_positives += u64::from(kth.is_some_and(|kth| neighbour.is_behind(kth)));
            state.nearest.push(neighbour);
        }
        // `kth` is the one before these rows: `push` may have selected too.
        state.settle(ranking, kth);
        Ok(false_positives)
    }

    fn merge(&mut self, other: Self) -> Result<()> {
        for (state, other) in self.states.iter_mut().zip(other.states) {
            state.nearest.merge(other.nearest)?;
        }
        Ok(())
    }
}
