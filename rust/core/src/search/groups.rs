//! The target rows whose ranks are computed for each query: lists of rows, shared by the queries of a group.

use crate::error::{Error, Result};
use crate::runtime::alloc::try_zeroed;

/// The target rows of each query, by groups.
#[derive(Debug, Clone, Copy)]
pub struct Groups<'a> {
    /// The group of each query.
    pub query_group: &'a [i64],
    /// Group `g` is `offsets[g] .. offsets[g + 1]` of `rows`. Groups + 1 entries.
    pub offsets: &'a [i64],
    /// Reference rows, in any order and at most once per group.
    pub rows: &'a [i64],
}

impl<'a> Groups<'a> {
    /// The target rows of a query.
    pub(crate) fn of(&self, query: usize) -> &'a [i64] {
        let group = self.query_group[query] as usize;
        &self.rows[self.offsets[group] as usize..self.offsets[group + 1] as usize]
    }

    /// Refuse inconsistent groups and rows that do not exist.
    pub(crate) fn check(&self, queries: usize, references: usize) -> Result<()> {
        let bad = |argument, wanted, given| Err(Error::BadArray { argument, wanted, given });
        let Some((&last, &[first, ..])) = self.offsets.last().zip(Some(self.offsets)) else {
            return bad("group_offsets", "begin with 0".to_owned(), "no entries".to_owned());
        };
        if first != 0 {
            return bad("group_offsets", "begin with 0".to_owned(), first.to_string());
        }
        if let Some(at) = self.offsets.windows(2).position(|pair| pair[0] > pair[1]) {
            let given = format!("{} at position {at} and {} behind it", self.offsets[at], self.offsets[at + 1]);
            return bad("group_offsets", "not fall".to_owned(), given);
        }
        if last != self.rows.len() as i64 {
            let wanted = format!("end with the number of group_rows, {}", self.rows.len());
            return bad("group_offsets", wanted, last.to_string());
        }
        if self.query_group.len() != queries {
            let wanted = format!("have one entry for each of the {queries} queries");
            return bad("query_group", wanted, format!("{} entries", self.query_group.len()));
        }
        let groups = self.offsets.len() - 1;
        let names = |group: &i64| usize::try_from(*group).is_ok_and(|group| group < groups);
        if let Some(at) = self.query_group.iter().position(|group| !names(group)) {
            let given = format!("{} at position {at}", self.query_group[at]);
            return bad("query_group", format!("name groups from 0 to below {groups}"), given);
        }
        // One more than the last group with this row; 0 if there is none.
        let mut named = try_zeroed::<usize>(references, "the groups of rows")?;
        for group in 0..groups {
            for at in self.offsets[group] as usize..self.offsets[group + 1] as usize {
                let given = || format!("{} at position {at}", self.rows[at]);
                match usize::try_from(self.rows[at]).ok().and_then(|row| named.get_mut(row)) {
                    None => return bad("group_rows", format!("name rows from 0 to below {references}"), given()),
                    Some(last) if *last == group + 1 => {
                        let given = format!("{} again in group {group}", given());
                        return bad("group_rows", "name a row once in a group".to_owned(), given);
                    }
                    Some(last) => *last = group + 1,
                }
            }
        }
        Ok(())
    }
}
