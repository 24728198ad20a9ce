"""Which matrix kernels the libraries use on this machine, and which ones they should.

faiss-cpu's wheel bundles a release of OpenBLAS that knows no processor later than its own year. On later ones it falls
back to kernels of the first processors with its instruction set's vendor: SSE3 on machines with AVX-512. The variable
`OPENBLAS_CORETYPE` names another kernel; OpenBLAS reads it once, when it is loaded.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

CORE_TYPE = "OPENBLAS_CORETYPE"
_TOLD = "EXACTKNN_BENCH_KERNEL"  # set in a command that was started again

# Kernels for processors without AVX: what OpenBLAS falls back to where it does not know the processor.
_WITHOUT_AVX = {"Generic", "Katmai", "Coppermine", "Northwood", "Prescott", "Banias", "Atom", "Core2", "Penryn"}
_WITHOUT_AVX |= {"Dunnington", "Nehalem", "Athlon", "Opteron", "Opteron_SSE3", "Barcelona", "Bobcat", "Nano"}

# The kernel's name by the instructions that it needs, best first.
_KERNELS = (("SKYLAKEX", {"avx512f", "avx512bw", "avx512dq", "avx512vl"}), ("HASWELL", {"avx2", "fma"}))

_PROBE = """
import threadpoolctl, {library}
print(*(i["architecture"] for i in threadpoolctl.threadpool_info() if i.get("internal_api") == "openblas"
        and {folder!r} in i["filepath"]))
"""


def plain_environment() -> dict[str, str]:
    """The environment without variables that choose a kernel: libraries as pip installs them."""
    return {name: value for name, value in os.environ.items() if name not in (CORE_TYPE, "OPENBLAS_L2_SIZE")}


def kernel(library: str, environment: Mapping[str, str]) -> str:
    """The kernel that the OpenBLAS bundled with `library` uses in `environment`; an empty text if it has none."""
    folder = {"faiss": "faiss_cpu.libs", "numpy": "numpy.libs", "scipy": "scipy.libs"}[library]
    imported = "scipy.linalg" if library == "scipy" else library
    command = [sys.executable, "-c", _PROBE.format(library=imported, folder=folder)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.strip()


def best_core_type(used: str) -> str | None:
    """The core type to set where `used` is a fallback; None where the library already knows the processor."""
    if used not in _WITHOUT_AVX:
        return None
    flags = _processor_flags()
    return next((name for name, needed in _KERNELS if needed <= flags), None)


def environment_at_best() -> tuple[dict[str, str], str]:
    """The environment in which faiss has the kernel that the processor has, and a line that names the kernel."""
    environment = plain_environment()
    used = kernel("faiss", environment)
    core_type = best_core_type(used)
    if core_type is None:
        return environment, f"OpenBLAS kernel {used or 'unknown'}, as installed"
    environment[CORE_TYPE] = core_type
    return (
        environment,
        f"OpenBLAS kernel {kernel('faiss', environment)}, by {CORE_TYPE}={core_type}; as installed {used}",
    )


def restart_at_best() -> str:
    """Start this command again in `environment_at_best`, unless it already runs there; return the line of the kernel.

    OpenBLAS reads its variable when it is loaded, which is before any code of the command.
    """
    if _TOLD in os.environ:
        return os.environ[_TOLD]
    environment, line = environment_at_best()
    os.execve(sys.executable, sys.orig_argv, {**environment, _TOLD: line})


def _processor_flags() -> set[str]:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return set()
    return {flag for line in lines if line.startswith("flags") for flag in line.split()[2:]}


def torch_product() -> str:
    """The library of torch's matrix products and the instructions that torch uses."""
    import torch

    library = "MKL" if "USE_MKL=ON" in torch.__config__.show() else "without MKL"
    return f"{library}, {torch.backends.cpu.get_cpu_capability()}"
