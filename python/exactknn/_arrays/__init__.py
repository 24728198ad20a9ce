"""The arguments of a search: numbers, texts and rows, checked and in the form that the native core reads.

scalars: counts, sizes, exponents, flags, names of metrics
dtypes:  floating types, exact conversion and rounding between them
matrix:  tensors, arrays and nested lists as row-major views
"""
