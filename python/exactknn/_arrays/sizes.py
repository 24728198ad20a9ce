"""How many neighbours there can be: the rules, and the words in which the core refuses the rest."""

from __future__ import annotations


def candidates(references: int, exclude_self: bool) -> int:
    """Return how many references can be neighbours of one query."""
    return max(references - exclude_self, 0)


def check_sizes(
    queries: int,
    references: int,
    k: int,
    exclude_self: bool,
    *,
    when: str = "self is excluded",
    where: str = "reference",
) -> None:
    """Refuse a ``k`` that is too large, or references that cannot hold the queries.

    Args:
        queries: their number.
        references: their number.
        k: neighbours of each query.
        exclude_self: whether query ``i`` is reference row ``i``, and not a neighbour of itself.
        when: what excludes it, in the words of the caller.
        where: what holds the references.

    Raises:
        ValueError: the references are too few.
    """
    if exclude_self and references < queries:
        raise ValueError(
            f"the {where} must begin with the queries when {when}: "
            f"wanted at least {queries} references, got {references}"
        )
    if k > candidates(references, exclude_self):
        itself = " without the query itself" if k <= references else ""
        raise ValueError(f"k must be at most the number of references{itself}, got k={k} with {references} references")
