"""Build the wheel and try it where nothing else is: every CPython >= 3.10 of this machine, with NumPy only.

Run from the project's root with ``python -m tests.wheel.check_wheel`` (or ``make wheel-check``). The interpreters are
those on PATH and, where pyenv is used, all that it holds. Each gets an empty environment under build/wheel-check.
Arguments go to ``maturin build``: with ``--zig`` the wheel must work with an old glibc.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from tests.wheel import needed

ROOT = Path(__file__).resolve().parents[2]
WORK = ROOT / "build" / "wheel-check"
GLIBC = (2, 17)
"""The newest that a wheel for other machines may need; RHEL 8 has 2.28, Ubuntu 20.04 2.31."""

# Runs in the empty environment, away from the sources.
TRY = """
import sys
import numpy as np
import exactknn

loaded = [name for name in ("torch", "faiss", "sklearn", "matplotlib", "tqdm") if name in sys.modules]
if loaded:
    sys.exit(f"import exactknn loaded {loaded}")
reference = np.array([[0, 0], [3, 4], [0, 1], [0, 1]], np.float32)
distances, indices = exactknn.knn(np.zeros((1, 2), np.float32), reference, 4)
if distances.tolist() != [[0.0, 1.0, 1.0, 25.0]] or indices.tolist() != [[0, 2, 3, 1]]:
    sys.exit(f"knn returned {distances.tolist()}, {indices.tolist()}")
try:
    import exactknn.evaluation
except ModuleNotFoundError as error:
    if "exactknn[torch]" not in str(error):
        sys.exit(f"exactknn.evaluation without torch says: {error}")
else:
    sys.exit("exactknn.evaluation was imported without torch")
print(f"exactknn {exactknn.__version__}, Python {sys.version.split()[0]}, numpy {np.__version__}")
"""


def interpreters() -> dict[tuple[int, int], str]:
    """The path of one CPython for each version from 3.10 on; a shim without an interpreter behind it is passed over."""
    candidates = [sys.executable]
    for minor in range(10, 20):
        found = shutil.which(f"python3.{minor}")
        candidates += [found] if found else []
    pyenv = os.environ.get("PYENV_ROOT")
    if pyenv:
        candidates += sorted(str(path) for path in Path(pyenv).glob("versions/*/bin/python3"))
    probe = "import sys; print(*sys.version_info[:2], sys.implementation.name, sys.executable)"
    chosen: dict[tuple[int, int], str] = {}
    for candidate in candidates:
        done = subprocess.run([candidate, "-c", probe], capture_output=True, text=True)
        if done.returncode == 0:
            major, release, name, path = done.stdout.strip().split(" ", 3)
            version = int(major), int(release)
            if name == "cpython" and version >= (3, 10):
                chosen.setdefault(version, path)
    return dict(sorted(chosen.items()))


def run(*command: str, cwd: Path = ROOT) -> None:
    """Run a command that must succeed; its output is shown."""
    subprocess.run(command, cwd=cwd, check=True)


def main(arguments: list[str]) -> int:
    """Build, then install and try with each interpreter; the first failure ends it with a non-zero code."""
    shutil.rmtree(WORK, ignore_errors=True)
    WORK.mkdir(parents=True)
    run(sys.executable, "-m", "maturin", "build", "--release", "--quiet", "--out", str(WORK), *arguments)
    (wheel,) = WORK.glob("*.whl")
    print(f"{wheel.name}: {wheel.stat().st_size / 1e6:.1f} MB", flush=True)
    if sys.platform == "linux":
        glibc = needed.newest_glibc(needed.of_wheel(wheel))
        print(f"needs glibc {'.'.join(map(str, glibc))}", flush=True)
        if "--zig" in arguments and glibc > GLIBC:
            print(f"expected at most glibc {'.'.join(map(str, GLIBC))}", file=sys.stderr)
            return 1
    versions = interpreters()
    for version, interpreter in versions.items():
        environment = WORK / "venv-{}.{}".format(*version)
        run(interpreter, "-m", "venv", str(environment))
        python = str(environment / "bin" / "python")
        run(python, "-m", "pip", "install", "--quiet", "--only-binary", ":all:", str(wheel))
        run(python, "-I", "-c", TRY, cwd=WORK)
    print(f"{len(versions)} passed, 0 failed")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
