"""The evaluation recipe: embeddings from a loader, and the output of the program."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from docs.recipes import evaluation as recipe
from exactknn.evaluation import AccuracyCalculator
from tests.recipes.recipe_helpers import METRICS, centroids_of

ROOT = Path(__file__).parents[2]


# --- extract_embeddings ----------------------------------------------------------------------------------------------


class Doubling(torch.nn.Module):
    """Notes how it is called."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.tensor(2.0))
        self.inference: list[bool] = []

    def forward(self, data: Tensor) -> Tensor:
        self.inference.append(torch.is_inference_mode_enabled())
        return data * self.weight.to(data.dtype)


def test_embeddings_and_labels_come_in_the_order_of_the_loader() -> None:
    batches = [
        (torch.tensor([[3.0, 4.0], [0.0, 2.0]]), torch.tensor([7, 5])),
        (torch.tensor([[-8.0, 6.0]]), torch.tensor([6])),
    ]
    embeddings, labels = recipe.extract_embeddings(Doubling(), batches)
    assert torch.equal(embeddings, torch.tensor([[0.6, 0.8], [0.0, 1.0], [-0.8, 0.6]]))
    assert labels.tolist() == [7, 5, 6]


def test_a_data_loader_is_read_to_its_last_short_batch() -> None:
    rows = torch.arange(1.0, 15.0).reshape(7, 2)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(rows, torch.arange(7)), batch_size=3)
    embeddings, labels = recipe.extract_embeddings(torch.nn.Identity(), loader)
    torch.testing.assert_close(embeddings, rows / rows.norm(dim=1, keepdim=True))
    assert labels.tolist() == list(range(7))


@pytest.mark.parametrize("training", [False, True])
def test_the_model_runs_in_inference_mode_and_keeps_its_own_mode(training: bool) -> None:
    model = Doubling().train(training)
    embeddings, _ = recipe.extract_embeddings(model, [(torch.ones(2, 3), torch.zeros(2))])
    assert model.inference == [True]
    assert model.training is training
    assert embeddings.is_inference()
    assert not embeddings.requires_grad
    assert not torch.is_inference_mode_enabled()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_rows_get_length_one_in_their_own_dtype_and_zero_rows_stay_zero(dtype: torch.dtype) -> None:
    data = torch.tensor([[3.0, 4.0], [0.0, 0.0], [-6.0, 8.0]], dtype=dtype)
    embeddings, _ = recipe.extract_embeddings(torch.nn.Identity(), [(data, torch.arange(3))])
    assert torch.equal(embeddings, torch.tensor([[0.6, 0.8], [0.0, 0.0], [-0.6, 0.8]], dtype=torch.float64).to(dtype))
    assert embeddings.dtype == dtype


@pytest.mark.parametrize(
    ("dtype", "size"),
    [(torch.float16, 60_000.0), (torch.float16, 1e-7), (torch.float32, 1e30), (torch.float32, 1e-30)],
)
def test_lengths_neither_overflow_nor_vanish(dtype: torch.dtype, size: float) -> None:
    data = torch.full((1, 64), size, dtype=dtype)
    embeddings, _ = recipe.extract_embeddings(torch.nn.Identity(), [(data, torch.arange(1))])
    assert torch.equal(embeddings, torch.full((1, 64), 0.125, dtype=dtype))


@pytest.mark.parametrize(
    "labels",
    [
        torch.tensor([2**24, 2**24 + 1], dtype=torch.int64),
        torch.tensor([3, 1], dtype=torch.int32),
        torch.tensor([0.25, -1.5], dtype=torch.float64),
        torch.tensor([[1, 0], [2, 0]]),
    ],
)
def test_labels_stay_as_they_are(labels: Tensor) -> None:
    _, found = recipe.extract_embeddings(torch.nn.Identity(), [(torch.ones(2, 3), labels)])
    assert found.dtype == labels.dtype
    assert found.tolist() == labels.tolist()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_embeddings_stay_there_and_labels_where_they_were() -> None:
    model = torch.nn.Linear(8, 4).cuda()
    batches = [(torch.randn(20, 8, device="cuda"), torch.arange(20) % 4) for _ in range(3)]
    split = embeddings, labels = recipe.extract_embeddings(model, batches)
    assert (embeddings.device.type, labels.device.type) == ("cuda", "cpu")
    levels = torch.stack([labels, labels // 2], dim=1)
    calculator = AccuracyCalculator(include=METRICS)
    on_cpu = (embeddings.cpu(), labels)
    for function, arguments, on_cpu_arguments in (
        (recipe.split_accuracy, (split, [split], False), (on_cpu, [on_cpu], False)),
        (recipe.nearest_centroid_accuracy, (split, split), (on_cpu, on_cpu)),
        (
            recipe.parent_conditioned_accuracy,
            ((embeddings, levels), [], True),
            ((embeddings.cpu(), levels), [], True),
        ),
    ):
        assert function(calculator, *arguments) == pytest.approx(function(calculator, *on_cpu_arguments), abs=1e-6)
    assert centroids_of(split, split)[0].device.type == "cuda"


def test_a_loader_without_batches_is_refused() -> None:
    with pytest.raises(ValueError, match="loader must give at least one batch, got none"):
        recipe.extract_embeddings(torch.nn.Identity(), [])


def test_embeddings_of_whole_numbers_are_refused() -> None:
    with pytest.raises(ValueError, match=r"embeddings must be floating point, got torch\.int64"):
        recipe.extract_embeddings(torch.nn.Identity(), [(torch.ones(2, 3, dtype=torch.int64), torch.arange(2))])


# --- the program -----------------------------------------------------------------------------------------------------

WITHOUT_NETWORK = """
import runpy, sys

def refuse(event, arguments):
    if event in ("socket.connect", "socket.getaddrinfo", "urllib.Request"):
        raise OSError(f"no network here: {event} {arguments}")

sys.addaudithook(refuse)
runpy.run_module("docs.recipes.evaluation", run_name="__main__")
"""


def test_the_program_prints_two_metrics_of_two_protocols_without_a_network() -> None:
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_NETWORK], cwd=ROOT, capture_output=True, text=True, timeout=50, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    lines = done.stdout.splitlines()
    assert [line.split("  ")[0] for line in lines] == ["test split among itself", "test split in the gallery"]
    values: list[dict[str, Any]] = [
        {name: float(value) for name, value in re.findall(r"([a-z]+_\w+) ([01]\.\d{4})\b", line)} for line in lines
    ]
    assert all(list(found) == ["precision_at_1", "r_precision"] for found in values)
    assert all(0.3 < value < 1 for found in values for value in found.values())
    assert values[0] != values[1]
