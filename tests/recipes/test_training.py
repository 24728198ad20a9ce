"""The training recipe: its parts by hand, and a short run."""

import pytest
import torch

from docs.recipes import training


def test_the_parts_of_the_data_are_apart():
    data = training.load()
    assert [len(part.labels) for part in data] == [1037, 227, 533]
    assert data.train.labels.unique().tolist() == data.validation.labels.unique().tolist() == list(range(7))
    assert data.held_out.labels.unique().tolist() == [7, 8, 9]
    assert (data.train.values.min(), data.train.values.max()) == (0, 1)


def test_turned_images_are_classes_of_their_own():
    image = torch.arange(64.0).unsqueeze(0)
    rows = training.turned(training.Rows(image, torch.tensor([3])))
    assert rows.labels.tolist() == [3, 13, 23, 33, 43, 53, 63, 73]
    assert len(rows.values.unique(dim=0)) == 8
    assert rows.values[0].equal(image[0])
    assert rows.values.sort(dim=1).values.eq(image).all()


def test_every_pair_once():
    rows = training.Rows(torch.tensor([[1.0, 0.0], [0.0, 2.0], [-3.0, 0.0]]), torch.tensor([0, 0, 1]))
    distances, same = training.pairs(rows)
    torch.testing.assert_close(distances, torch.tensor([2**0.5, 2, 2**0.5]))
    assert same.tolist() == [True, False, False]


def test_the_threshold_of_some_pairs_is_applied_to_others():
    angles = torch.tensor([0.0, 0.2, 1.5, 1.6])
    rows = torch.stack([angles.cos(), angles.sin()], 1)
    validation = training.Rows(rows, torch.tensor([0, 0, 1, 1]))
    result = training.verify(validation, validation)
    assert 0.2 < result.threshold < 1.2
    assert (result.verification_accuracy, result.balanced_accuracy) == (1, 1)
    # The same distances, but one of the two classes is spread: one match in two is missed, no other pair is taken.
    spread = training.Rows(rows[[0, 1, 2, 2]] * torch.tensor([[1.0], [1], [1], [-1]]), torch.tensor([0, 0, 1, 1]))
    result = training.verify(validation, spread)
    assert result.verification_accuracy == pytest.approx(5 / 6)
    assert result.balanced_accuracy == 0.75


@pytest.mark.timeout(300)
def test_a_short_run_improves_what_it_trains_on(capsys):
    stages = training.main(steps=12)
    assert list(stages) == ["pixels", "before", "after"]
    assert stages["after"].new_rows["r_precision"] > stages["before"].new_rows["r_precision"] + 0.05
    assert all(0 < value <= 1 for stage in stages.values() for value in stage.held_out.values())
    assert 0 < stages["after"].verification.threshold < 2
    printed = capsys.readouterr().out
    assert "rows: 1037 train, 227 validation, 533 held out" in printed
    assert f"{stages['after'].verification.verification_accuracy:8.4f}" in printed
