"""Searches of references that do not fit into memory, or come as they are made.

rows:       where the rows lie, and how the next block is read ahead
plan:       blocks that keep within a bound of memory
search:     the search of one block after the other, which can be left and continued
checkpoint: the file from which an interrupted search goes on
"""
