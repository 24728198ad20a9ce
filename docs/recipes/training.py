"""Train a small network with RankedListLoss, evaluate it on unseen classes, and verify pairs at a threshold.

Run from the project's root with ``python -m docs.recipes.training``. It uses scikit-learn's 1,797 digits, downloads
nothing, and takes about half a minute on two cores.

    classes 0-6 --+-- four rows of five --> rotated, mirrored ---> batches by class -> RankedListLoss -> network
                  +-- the fifth ----------> AccuracyCalculator; pairs -> select_threshold -----> threshold
    classes 7-9 --------------------------> AccuracyCalculator; pairs -> match or not, at that threshold

Classes 7 to 9 are used neither for training nor to select the threshold. Seven classes are too few to learn what
separates new ones: trained on these alone, the network improves on new rows of the same classes and gets worse on other
classes. Rotating and mirroring each image in eight ways, and making each way a class of its own, gives 56 classes.

Copy what you need; nothing here is part of the installed package.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from sklearn.datasets import load_digits
from torch import Tensor

from exactknn.distances import LpDistance
from exactknn.evaluation import AccuracyCalculator, match_balanced_accuracy, select_threshold
from exactknn.losses import RankedListLoss

HELD_OUT = 7  # this class and higher ones are never trained on
METRICS = ("precision_at_1", "r_precision", "mean_average_precision_at_r")
DISTANCE = LpDistance()  # of the loss and the pairs; the calculator's squared distance gives the same order


class Rows(NamedTuple):
    """Images or their embeddings ``(n, d)``, and labels ``(n,)``."""

    values: Tensor
    labels: Tensor


class Data(NamedTuple):
    """The three splits of the digits."""

    train: Rows
    validation: Rows
    held_out: Rows


class Verification(NamedTuple):
    """How well a threshold separates matches from non-matches."""

    threshold: float
    verification_accuracy: float
    balanced_accuracy: float


class Stage(NamedTuple):
    """The metrics before or after training."""

    new_rows: dict[str, float]
    held_out: dict[str, float]
    verification: Verification


def load() -> Data:
    """Return the digits, with pixels from 0 to 1, split by class and then by row."""
    digits = load_digits()
    images = torch.tensor(digits.data, dtype=torch.float32) / 16
    labels = torch.tensor(digits.target)
    seen = labels < HELD_OUT
    fifth = torch.arange(len(labels)) % 5 == 4
    return Data(*(Rows(images[part], labels[part]) for part in (seen & ~fifth, seen & fifth, ~seen)))


def network(seed: int) -> torch.nn.Module:
    """Return a small convolutional network from 64 pixels to 64 dimensions."""
    torch.manual_seed(seed)
    return torch.nn.Sequential(
        torch.nn.Unflatten(1, (1, 8, 8)),
        torch.nn.Conv2d(1, 32, 3, padding=1),
        torch.nn.ReLU(),
        torch.nn.MaxPool2d(2),
        torch.nn.Conv2d(32, 64, 3, padding=1),
        torch.nn.ReLU(),
        torch.nn.Flatten(),
        torch.nn.Linear(64 * 4 * 4, 64),
    )


def turned(rows: Rows) -> Rows:
    """Return each image in its eight orientations; each pair of class and orientation becomes a class of its own."""
    images = rows.values.view(-1, 8, 8)
    turns = [torch.rot90(images, quarter, (1, 2)) for quarter in range(4)]
    ways = [way.flatten(1) for turn in turns for way in (turn, turn.flip(2))]
    return Rows(torch.cat(ways), torch.cat([rows.labels + 10 * number for number in range(len(ways))]))


def train(model: torch.nn.Module, rows: Rows, steps: int, rows_per_class: int = 4, seed: int = 0) -> list[float]:
    """Train the model with the same number of rows of each class in every batch, since the loss compares rows.

    A little noise on the pixels keeps the network from memorising the images.

    Args:
        model: trained in place.
        rows: images and labels.
        steps: number of batches.
        rows_per_class: rows of each class in a batch.
        seed: seed for the choice of rows and the noise.

    Returns:
        The loss of each step.
    """
    loss = RankedListLoss(margin=0.4, neg_temperature=10, distance=DISTANCE)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    generator = torch.Generator().manual_seed(seed)
    members = [(rows.labels == label).nonzero().squeeze(1) for label in torch.unique(rows.labels)]
    model.train()
    losses = []
    for _ in range(steps):
        chosen = [torch.randperm(len(member), generator=generator)[:rows_per_class] for member in members]
        batch = torch.cat([member[places] for member, places in zip(members, chosen, strict=True)])
        images = rows.values[batch] + 0.1 * torch.randn(len(batch), 64, generator=generator)
        value = loss(model(images), rows.labels[batch])
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
        losses.append(value.item())
    return losses


def embed(model: torch.nn.Module, rows: Rows) -> Rows:
    """Return the model's embeddings, scaled to norm 1."""
    model.eval()
    with torch.inference_mode():
        return Rows(torch.nn.functional.normalize(model(rows.values)), rows.labels)


def pairs(rows: Rows) -> tuple[Tensor, Tensor]:
    """Return the distances of all pairs of different rows, each once, and whether their labels are equal."""
    first, second = torch.triu_indices(len(rows.labels), len(rows.labels), offset=1)
    return DISTANCE(rows.values)[first, second], rows.labels[first] == rows.labels[second]


def verify(validation: Rows, held_out: Rows) -> Verification:
    """Select a threshold on validation pairs and apply it to pairs of other classes.

    The metric is balanced accuracy, the mean of the accuracies on matches and on non-matches, because the share of
    matches differs: one pair in seven for validation, one in three for held-out classes. Plain accuracy would fit the
    threshold to the share.

    Args:
        validation: embeddings to select the threshold on.
        held_out: embeddings to apply it to.
    """
    threshold, _ = select_threshold(*pairs(validation), match_balanced_accuracy, is_inverted=DISTANCE.is_inverted)
    distances, same = pairs(held_out)
    right = (distances <= threshold) == same
    balanced = (right[same].double().mean() + right[~same].double().mean()) / 2
    return Verification(threshold, right.double().mean().item(), balanced.item())


def print_table(title: str, columns: dict[str, dict[str, float]]) -> None:
    """Print values by name, one column per stage."""
    print(f"\n{title:31}" + "".join(f"{stage:>8}" for stage in columns))
    for name in columns["before"]:
        print(f"{name.replace('_', ' '):31}" + "".join(f"{column[name]:8.4f}" for column in columns.values()))


def main(steps: int = 150) -> dict[str, Stage]:
    """Train, and print metrics and verification before and after, next to those of the raw pixels.

    Args:
        steps: number of batches to train on.

    Returns:
        The stages ``pixels``, ``before`` and ``after``.
    """
    data = load()
    model = network(seed=0)
    calculator = AccuracyCalculator(include=METRICS)

    def judge(embedder: torch.nn.Module) -> Stage:
        validation, held_out = embed(embedder, data.validation), embed(embedder, data.held_out)
        return Stage(
            calculator.get_accuracy(*validation), calculator.get_accuracy(*held_out), verify(validation, held_out)
        )

    stages = {"pixels": judge(torch.nn.Identity()), "before": judge(model)}
    losses = train(model, turned(data.train), steps)
    stages["after"] = judge(model)

    parts = ", ".join(f"{len(part.labels)} {name.replace('_', ' ')}" for name, part in data._asdict().items())
    print(f"rows: {parts}")
    print(f"loss: {losses[0]:.4f} at the first step, {losses[-1]:.4f} at the last of {steps}")
    print_table("new rows of classes 0 to 6", {name: stage.new_rows for name, stage in stages.items()})
    held_out = {name: stage.held_out | stage.verification._asdict() for name, stage in stages.items()}
    print_table("held-out classes 7 to 9", held_out)
    return stages


if __name__ == "__main__":
    main()
