"""Examples in docstrings run: each in its module, with the small objects of `docstring_worlds`, in
a folder of its own.

An example that shows a result must give it; one that shows none must not fail.
"""

import doctest
import importlib
from pathlib import Path

import jax
import pytest

import fluctua
from docstring_worlds import world_of

pytestmark = pytest.mark.long

SOURCE = Path(fluctua.__file__).parent


def examples():
    """Every docstring with examples, and its module."""
    finder = doctest.DocTestFinder()
    for path in sorted(SOURCE.rglob("*.py")):
        if ">>>" in path.read_text():
            module = importlib.import_module(
                ".".join(("fluctua", *path.relative_to(SOURCE).with_suffix("").parts))
            )
            yield from (
                pytest.param(module, test, id=test.name)
                for test in finder.find(module)
                if test.examples
            )


class Checker(doctest.OutputChecker):
    """Accepts any result of an example that shows none."""

    def check_output(self, want, got, optionflags):
        return not want or super().check_output(want, got, optionflags)


@pytest.mark.parametrize(("module", "example"), list(examples()))
def test_example(module, example, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    report = []
    with jax.enable_x64(False):  # as users have it
        example.globs = world_of(module.__name__) | vars(module)
        doctest.DocTestRunner(Checker(), verbose=False).run(example, out=report.append)
    assert not report, "".join(report)
