"""Ctrl-C while the command line is still being imported."""

import os
import subprocess
import sys

import pytest

# Raises the signal in the process itself, at the import of one module: no clock decides where it arrives.
INTERRUPT = """
import os, signal, sys

class Interrupt:
    def find_spec(self, name, path=None, target=None):
        if name == os.environ["INTERRUPT_AT"]:
            sys.meta_path.remove(self)
            os.kill(os.getpid(), signal.SIGINT)

signal.signal(signal.SIGINT, signal.default_int_handler)
sys.meta_path.insert(0, Interrupt())
"""
PROGRAM = "import sys\nfrom exactknn.cli import main\nsys.exit(main())\n"

pytestmark = pytest.mark.skipif(os.name == "nt", reason="no process can send itself Ctrl-C there")


def interrupted(folder, at, *command):
    (folder / "sitecustomize.py").write_text(INTERRUPT)
    path = os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"PYTHONPATH": path, "INTERRUPT_AT": at}
    return subprocess.run([sys.executable, *command], env=environment, capture_output=True, text=True, timeout=50)


@pytest.mark.parametrize("at", ["numpy", "exactknn._core", "exactknn.cli.main", "exactknn.cli.info"])
def test_the_command_ends_in_one_line(tmp_path, at):
    program = tmp_path / "exactknn"
    program.write_text(PROGRAM)
    for command in (["-m", "exactknn"], [program]):
        done = interrupted(tmp_path, at, *command, "info")
        assert (done.returncode, done.stdout, done.stderr) == (130, "", "exactknn: interrupted\n")


def test_other_programs_keep_their_interrupts(tmp_path):
    program = tmp_path / "program"
    program.write_text("try:\n    import exactknn\nexcept KeyboardInterrupt:\n    print('mine')\n")
    done = interrupted(tmp_path, "exactknn._index", program)
    assert (done.returncode, done.stdout, done.stderr) == (0, "mine\n", "")


def test_a_program_that_ignores_interrupts_still_does(tmp_path):
    program = tmp_path / "exactknn"
    program.write_text(f"import signal\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\n{PROGRAM}")
    done = interrupted(tmp_path, "numpy", program, "--version")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("exactknn ")
