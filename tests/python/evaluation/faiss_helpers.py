"""Rows and helpers that the tests of this folder share."""

from __future__ import annotations

import logging

import numpy as np
import torch


def rows_of(n, d=8, seed=0):
    return torch.from_numpy(np.random.default_rng(seed).standard_normal((n, d)).astype(np.float32))


def expected(query, reference, k):
    found = torch.cdist(query.double(), reference.double()).square().topk(k, largest=False)
    return found.values.float(), found.indices


def warnings_in(caplog):
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
