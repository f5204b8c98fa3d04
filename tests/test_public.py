"""The public packages: what they show, how it is documented, and which version it is."""

import importlib
import inspect
import re
from importlib import metadata

from typer.testing import CliRunner

import fluctua
import fluctua.insitu
import fluctua.tcmt
from fluctua.cli.app import app

PACKAGES = (
    fluctua,
    fluctua.tcmt,
    fluctua.insitu,
    fluctua.insitu.files,
    fluctua.insitu.instrument,
)


def test_dir_shows_public_names_and_packages_only():
    shown = [name for name in dir(fluctua) if not name.startswith("__")]
    rooms = {name for name in shown if name not in fluctua.__all__}
    assert set(fluctua.__all__) <= set(shown)
    for room in rooms:
        assert hasattr(importlib.import_module(f"fluctua.{room}"), "__path__"), room


def test_version():
    assert fluctua.__version__ == metadata.version("fluctua")
    assert CliRunner().invoke(app, ["--version"]).output == f"fluctua {fluctua.__version__}\n"


def test_public_names_are_documented_and_arguments_can_be_scanned():
    """Two arguments or more stand under `Args:`, and what is returned under `Returns:`."""
    for package in PACKAGES:
        for name in package.__all__:
            value = getattr(package, name)
            assert value.__doc__, f"{package.__name__}.{name}"
            if inspect.isfunction(value) and len(inspect.signature(value).parameters) > 1:
                check_arguments(value)


def check_arguments(function):
    signature = inspect.signature(function)
    _, _, listed = function.__doc__.partition("\n    Args:\n")
    for name in signature.parameters:
        entry = rf"^        (\*\*)?{name}: \S"
        assert re.search(entry, listed, re.MULTILINE), f"{function.__name__}: {name}"
    explained = bool(re.search(r"^    Returns: ?\S|^    Returns:\n +\S", listed, re.MULTILINE))
    assert explained == (signature.return_annotation not in (None, "None")), function.__name__
