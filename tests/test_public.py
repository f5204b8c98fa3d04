"""The public package: what it shows, and which version it is."""

import importlib
import inspect
import re
from importlib import metadata

import pytest
from typer.testing import CliRunner

import fluctua
import fluctua.insitu
import fluctua.tcmt
from fluctua.cli.app import app


def test_dir_shows_public_names_and_packages_only():
    shown = [name for name in dir(fluctua) if not name.startswith("__")]
    rooms = {name for name in shown if name not in fluctua.__all__}
    assert set(fluctua.__all__) <= set(shown)
    for room in rooms:
        assert hasattr(importlib.import_module(f"fluctua.{room}"), "__path__"), room


@pytest.mark.parametrize("name", fluctua.__all__)
def test_public_names_are_documented(name):
    assert getattr(fluctua, name).__doc__


def test_version():
    assert fluctua.__version__ == metadata.version("fluctua")
    assert CliRunner().invoke(app, ["--version"]).output == f"fluctua {fluctua.__version__}\n"


@pytest.mark.parametrize(
    "package",
    [fluctua, fluctua.tcmt, fluctua.insitu, fluctua.insitu.files, fluctua.insitu.instrument],
    ids=lambda package: package.__name__,
)
def test_arguments_of_public_functions_can_be_scanned(package):
    """Whoever has two arguments or more explains each under `Args:`, and what comes back under
    `Returns:`.
    """
    functions = [
        value for name in package.__all__ if inspect.isfunction(value := getattr(package, name))
    ]
    for function in functions:
        signature = inspect.signature(function)
        if len(signature.parameters) < 2:
            continue
        before, _, listed = function.__doc__.partition("\n    Args:\n")
        for name in signature.parameters:
            assert re.search(rf"^        (\*\*)?{name}: \S", listed, re.MULTILINE), (
                f"{function.__name__}: {name}"
            )
        explained = bool(re.search(r"^    Returns: ?\S|^    Returns:\n +\S", listed, re.MULTILINE))
        assert explained == (signature.return_annotation not in (None, "None")), function.__name__
