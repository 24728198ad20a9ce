"""Searches on CUDA, MPS and other devices: the filter, the values, and the memory budget."""
