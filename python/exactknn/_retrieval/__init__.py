"""Retrieval metrics from the ranks of the relevant references. NumPy and the core only.

    query and reference labels ──Groups.of_codes──> Groups: the references that are relevant to each query
    a backend's neighbours, relevant or not ──Hits.from_relevance──┐
    ranks from the core, without neighbours ─────────────Hits─────┴──> Hits ──Metric───> one value per query
    one value per query ──mean_of, class_means──> reported values

With binary relevance, a ranked list is determined by the ranks of its relevant rows: every metric here is a function of
these ranks, of the number of relevant references, and of the number of neighbours considered. So no metric needs a
Python step per query, and none needs the full list of neighbours.

Sums have a fixed order or are rounded once, so that reported values do not depend on the machine.
"""
