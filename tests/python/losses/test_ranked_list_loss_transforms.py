"""RankedListLoss inside ``torch.vmap`` and ``torch.func.grad``: the values of a loop."""

import pytest
import torch

from exactknn.losses import RankedListLoss

BATCHES = torch.randn(3, 8, 4, generator=torch.Generator().manual_seed(0))
BATCHES[1, 3] = BATCHES[1, 2]  # coinciding rows
LABELS = torch.tensor([[0, 0, 1, 1, 2, 2, 0, 1], [0, 1, 2, 0, 1, 2, 0, 1], [0, 0, 0, 0, 1, 1, 1, 1]])


def loss_of(rows, labels):
    return RankedListLoss(0.4, 10, pos_temperature=2)(rows, labels)


def gradient_of(rows, labels):
    rows = rows.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(loss_of(rows, labels), rows)
    return gradient


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_batch_of_losses_is_a_loop(dtype):
    rows = BATCHES.to(dtype)
    wanted = torch.stack([loss_of(*item) for item in zip(rows, LABELS, strict=True)])
    torch.testing.assert_close(torch.vmap(loss_of)(rows, LABELS), wanted)
    shared = torch.stack([loss_of(item, LABELS[0]) for item in rows])
    torch.testing.assert_close(torch.vmap(loss_of, in_dims=(0, None))(rows, LABELS[0]), shared)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_batch_of_gradients_is_a_loop(dtype):
    rows = BATCHES.to(dtype)
    wanted = torch.stack([gradient_of(*item) for item in zip(rows, LABELS, strict=True)])
    torch.testing.assert_close(torch.func.grad(loss_of)(rows[0], LABELS[0]), wanted[0])
    torch.testing.assert_close(torch.vmap(torch.func.grad(loss_of))(rows, LABELS), wanted)
