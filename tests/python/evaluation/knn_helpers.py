"""Rows and helpers that the tests of this folder share."""

import torch

SQUARED = {"normalize_embeddings": False, "power": 2}


def rows(n, d, seed=0, dtype=torch.float32):
    return torch.randn(n, d, generator=torch.manual_seed(seed), dtype=torch.float64).to(dtype)


class Foreign:
    """A distance that is not a module; it records its calls."""

    is_inverted = False

    def __init__(self):
        self.calls = []

    def __call__(self, query, reference):
        self.calls.append((query, reference))
        return torch.cdist(query, reference, p=1)
