"""Rows and helpers that the tests of this folder share."""

import math

import torch

X = torch.tensor(
    [
        [length * math.cos(math.radians(angle)), length * math.sin(math.radians(angle))]
        for length, angle in [(1, 0), (2, 12), (0.5, 55), (3, 25), (1, 70), (1, 130)]
    ],
    dtype=torch.float64,
)
LABELS = torch.tensor([0, 0, 0, 1, 1, 1])


def row_losses(loss, embeddings, labels):
    return loss.loss_terms(embeddings, labels)["loss"]["losses"]
