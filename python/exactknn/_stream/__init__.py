"""Searches of references that do not fit in memory, or are generated on the fly.

rows:       sources of rows, and how the next block is read ahead
plan:       block sizes that keep within a memory limit
search:     the search block by block, which can be interrupted and resumed
checkpoint: the file from which an interrupted search resumes
"""
