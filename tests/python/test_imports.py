"""What an import loads, and that its order among the others does not matter. Each in a fresh interpreter."""

import importlib.util
import itertools
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

LOADED = """
import sys
{program}
heavy = {{"torch", "faiss", "sklearn", "scipy", "matplotlib", "tqdm", "pytorch_metric_learning"}}
print(sorted(heavy & {{name.partition(".")[0] for name in sys.modules}}))
"""


def test_the_package_loads_nothing_heavy(run_python):
    program = "import exactknn, exactknn.types\nexactknn.knn([[0.0], [1.0]], k=1)"
    assert run_python(LOADED.format(program=program)) == "[]"


@pytest.mark.parametrize("module", ["evaluation", "distances", "reducers", "losses"])
def test_the_torch_parts_load_neither_faiss_nor_sklearn(run_python, module):
    loaded = run_python(LOADED.format(program=f"import exactknn.{module}"))
    assert "torch" in loaded
    assert "faiss" not in loaded
    assert "sklearn" not in loaded
    assert "pytorch_metric_learning" not in loaded


@pytest.mark.parametrize(
    "module",
    [
        "evaluation",
        "distances",
        "reducers",
        "losses",
        "plots",
        "compat.accuracy_calculator",
        "compat.distances",
        "compat.losses",
        "compat.reducers",
    ],
)
def test_without_torch_the_error_names_the_extra(run_python, module):
    program = f"""
import sys
sys.modules["torch"] = None
import exactknn
print(exactknn.knn([[0.0], [1.0]], k=1)[1].tolist())
try:
    import exactknn.{module}
except ModuleNotFoundError as error:
    print(error.name, error)
"""
    first, second = run_python(program).splitlines()
    assert first == "[[1], [0]]"
    assert second.startswith("torch ")
    assert f"exactknn[{'plots' if module == 'plots' else 'torch'}]" in second


ORDER = """
import {0}
import {1}
import {2}
import numpy, torch, faiss, exactknn
from exactknn.evaluation import RustKNN
x = numpy.random.default_rng(0).standard_normal((2000, 32)).astype("float32")
index = faiss.IndexFlatL2(32)
index.add(x)
found = [index.search(x, 3)[1], exactknn.knn(x, x, 3)[1], RustKNN()(torch.tensor(x), 3, torch.tensor(x))[1].numpy()]
found.append(torch.cdist(torch.tensor(x).double(), torch.tensor(x).double()).topk(3, largest=False).indices.numpy())
print(all((other == found[1]).all() for other in found))
"""


@pytest.mark.parametrize("order", list(itertools.permutations(("torch", "faiss", "exactknn"))), ids="-".join)
def test_every_order_of_imports_searches(run_python, order):
    assert run_python(ORDER.format(*order)) == "True"


def test_an_import_changes_neither_environment_nor_threads(run_python):
    program = """
import os, torch
before = dict(os.environ), torch.get_num_threads(), torch.get_num_interop_threads()
import exactknn.evaluation, exactknn.distances, exactknn.losses
x = torch.randn(50, 4)
exactknn.evaluation.RustKNN()(x, 3, x)
print(before == (dict(os.environ), torch.get_num_threads(), torch.get_num_interop_threads()))
"""
    assert run_python(program) == "True"


def test_info_records_are_seen_with_a_plain_configuration(run_python):
    program = """
import logging, sys, torch
from exactknn.evaluation import RustKNN
x = torch.randn(5, 4)
RustKNN()(x, 2, x)
logging.basicConfig(stream=sys.stdout)
logging.getLogger("exactknn").setLevel(logging.INFO)
RustKNN()(x, 3, x)
"""
    printed = run_python(program)
    assert "INFO:exactknn.evaluation.knn:" in printed
    assert "k=3" in printed
    assert "k=2" not in printed


@pytest.mark.parametrize("missing", ["sklearn", "sklearn.utils.validation", "joblib"])
def test_without_scikit_learn_the_error_names_the_extra(run_python, missing):
    program = f"""
import sys
sys.modules[{missing!r}] = None
try:
    import exactknn.sklearn
except ModuleNotFoundError as error:
    print(error.name, error)
"""
    printed = run_python(program)
    assert printed.startswith("sklearn exactknn.sklearn needs scikit-learn 1.6") and "exactknn[sklearn]" in printed


def test_the_transformer_loads_neither_torch_nor_faiss(run_python):
    loaded = run_python(LOADED.format(program="import exactknn.sklearn"))
    assert "sklearn" in loaded and "torch" not in loaded and "faiss" not in loaded


def test_the_map_in_contributing_names_every_folder():
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    package = ROOT / "python" / "exactknn"
    folders = {f"{path.parent.name}/" for path in package.glob("**/__init__.py") if path.parent != package}
    section = text.split("## The Python package")[1].split("\n## ")[0]
    assert folders == set(re.findall(r"`(\w+/)`", section))
    modules = set(re.findall(r"`(\w+\.py)`", section))
    assert modules <= {path.name for path in package.glob("**/*.py")}


SUBINTERPRETER = """
import exactknn
for name in ("_interpreters", "_xxsubinterpreters"):
    try:
        module = __import__(name)
        break
    except ImportError:
        pass
interpreter = module.create()
program = '''
try:
    import exactknn
except ImportError as error:
    text = str(error)
else:
    text = "imported"
import os
os.write(1, text.encode())
'''
run = getattr(module, "exec", None) or module.run_string
run(interpreter, program)
module.destroy(interpreter)
"""


@pytest.mark.skipif(
    not any(map(importlib.util.find_spec, ("_interpreters", "_xxsubinterpreters"))), reason="no subinterpreters"
)
def test_a_subinterpreter_is_refused_in_words(run_python):
    assert run_python(SUBINTERPRETER).startswith("exactknn works in one interpreter of a process, as NumPy does")
