"""How many neighbours there can be, with the error messages of the core."""

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
    """Check that ``k`` is not too large, and that the references can include the queries.

    Args:
        queries: number of queries.
        references: number of references.
        k: neighbours per query.
        exclude_self: whether query ``i`` is reference row ``i``, and not a neighbour of itself.
        when: why self is excluded, for the message.
        where: name of the references, for the message.

    Raises:
        ValueError: there are too few references.
    """
    if exclude_self and references < queries:
        raise ValueError(
            f"the {where} must begin with the queries when {when}: "
            f"wanted at least {queries} references, got {references}"
        )
    if k > candidates(references, exclude_self):
        itself = " without the query itself" if k <= references else ""
        raise ValueError(f"k must be at most the number of references{itself}, got k={k} with {references} references")
