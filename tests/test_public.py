"""The public package: what it shows, and which version it is."""

import importlib
from importlib import metadata

import pytest
from typer.testing import CliRunner

import fluctua
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
