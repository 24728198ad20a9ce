"""Spellings of pytorch-metric-learning 2.9, for code that is moved over step by step.

Each module carries the names of the module of that library which it stands for. New code takes the names of
`exactknn.evaluation`, `exactknn.distances`, `exactknn.reducers` and `exactknn.losses`.
"""
