"""``exactknn info``: the version, the SIMD level, the threads and the build."""

from __future__ import annotations

import argparse
import json
import platform
from typing import Any

import numpy as np

from exactknn import _core
from exactknn.cli.console import CommandError, print_text
from exactknn.cli.options import new_command

_EPILOG = """\
example:
  EXACTKNN_SIMD=avx2 exactknn info --json
"""


def add_command(commands: argparse._SubParsersAction[Any]) -> None:
    """Add the command to the command line."""
    command = new_command(
        commands,
        "info",
        run,
        "show the version, the SIMD level, the threads and the build",
        "Show the version, the SIMD level in use and those available, the threads and the build.",
        _EPILOG,
    )
    command.add_argument("--json", action="store_true", help="print one JSON object")


def run(arguments: argparse.Namespace) -> int:
    """Return the exit code after printing the facts."""
    try:
        facts: dict[str, Any] = {
            "version": _core.__version__,
            "simd_level": _core.simd_level(),
            "available_simd_levels": list(_core.available_simd_levels()),
            "threads": _core.get_num_threads(),
            "build": dict(_core.build_info()),
            "python": platform.python_version(),
            "numpy": np.__version__,
            "platform": platform.platform(),
        }
    except ValueError as error:  # EXACTKNN_SIMD or EXACTKNN_NUM_THREADS is invalid
        raise CommandError(str(error)) from error
    if arguments.json:
        print_text(json.dumps(facts, indent=2))
        return 0
    lines = {
        "exactknn": facts["version"],
        "SIMD level": f"{facts['simd_level']} (available: {', '.join(facts['available_simd_levels'])})",
        "threads": facts["threads"],
        "python": facts["python"],
        "numpy": facts["numpy"],
        "platform": facts["platform"],
        "build": ", ".join(f"{name} {value}" for name, value in facts["build"].items()),
    }
    width = max(map(len, lines))
    for name, value in lines.items():
        print_text(f"{name:<{width}}  {value}")
    return 0
