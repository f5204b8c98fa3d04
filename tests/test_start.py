"""The command line starts quickly: help needs no JAX, NumPy or Matplotlib."""

import subprocess
import sys

import pytest

PROGRAM = """
import sys
from fluctua.cli.app import app
try:
    app({words!r}, prog_name="fluctua")
except SystemExit as end:
    assert not end.code, end.code
heavy = {{"jax", "numpy", "matplotlib"}} & set(sys.modules)
assert not heavy, heavy
"""


@pytest.mark.parametrize("words", [["--help"], ["--version"], ["train", "--help"]], ids=" ".join)
def test_help_imports_no_arrays(words):
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(words=words)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
