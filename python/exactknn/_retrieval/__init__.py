"""Retrieval metrics from the ranks of the relevant references. NumPy and the core only.

    query and reference labels ──Groups.of_codes──> Groups: the references that are relevant to each query
    a backend's neighbours, relevant or not ──Hits.from_relevance──┐
    ranks from the core, without neighbours ─────────────Hits─────┴──> Hits ──Metric───> one value per query
    one value per query ──mean_of, class_means──> what is reported

With relevance yes or no, a ranked list is known by the ranks of its relevant rows: every metric here is a function of
these ranks, of their number among all references, and of how many neighbours were looked at. So no metric needs a step
of Python for each query, and none needs the full list of neighbours.

Sums are formed in one order or rounded once, so that the reported values do not depend on the machine either.
"""
