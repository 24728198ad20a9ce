"""Arguments of a search: numbers, strings and rows, checked and converted to the form that the core takes.

scalars: counts, sizes, exponents, flags, names of metrics
dtypes:  floating types, exact conversion and rounding between them
matrix:  tensors, arrays and nested lists as row-major views
"""
