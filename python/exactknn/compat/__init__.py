"""Names of pytorch-metric-learning 2.9, for gradual migration.

Each module has the names of the corresponding module of that library. New code should use the names of
`exactknn.evaluation`, `exactknn.distances`, `exactknn.reducers` and `exactknn.losses`.
"""
