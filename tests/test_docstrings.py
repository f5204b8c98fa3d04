"""Examples in docstrings run, each in a folder of its own.

Every public name has an example. It begins with the names of docs/reference/index.md alone, and
gives what it shows. An example of an internal name runs in its module, with the small objects of
`docstring_worlds`; where it shows no result, any is right.
"""

import doctest
import importlib
from pathlib import Path

import jax
import pytest

import fluctua
from docstring_worlds import begin_example, find_world
from public_names import find_public

SOURCE = Path(fluctua.__file__).parent
PUBLIC = {f"{value.__module__}.{value.__qualname__}": name for name, value in find_public().items()}
"""Public names by the places where they are defined."""
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


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


EXAMPLES = list(examples())


def test_every_public_name_has_an_example():
    shown = {parameter.id for parameter in EXAMPLES}
    assert sorted(name for home, name in PUBLIC.items() if home not in shown) == []


def test_no_example_is_skipped():
    assert [parameter.id for parameter in EXAMPLES if "SKIP" in parameter.values[1].docstring] == []


@pytest.mark.long
@pytest.mark.parametrize(("module", "example"), EXAMPLES)
def test_example(module, example, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    report = []
    public = PUBLIC.get(example.name)
    checker = doctest.OutputChecker() if public else Checker()
    with jax.enable_x64(False):  # as users have it
        example.globs = (
            begin_example(public) if public else find_world(module.__name__) | vars(module)
        )
        doctest.DocTestRunner(checker, verbose=False, optionflags=FLAGS).run(
            example, out=report.append
        )
    assert not report, "".join(report)
