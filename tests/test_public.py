"""The public packages: what they show, how it is documented, and which version it is."""

import importlib
import inspect
import re
from importlib import metadata

from typer.testing import CliRunner

import fluctua
from fluctua.cli.app import app
from public_names import find_public


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
    """The first line stands alone, arguments under `Args:`, what is returned under `Returns:`."""
    for name, value in find_public().items():
        assert value.__doc__, name
        first, _, rest = value.__doc__.partition("\n")
        assert first.endswith("."), name
        assert rest.startswith("\n"), name
        if inspect.isfunction(value) and inspect.signature(value).parameters:
            check_arguments(value)


def test_fields_of_records_continue_on_indented_lines():
    """As docs/conf.py expects them: a line that is not indented ends the list of fields."""
    split = re.compile(r"^[a-z_]\w*: \S.*\n(?![A-Za-z_]\w*(?:, \w+)*: |    |>>>)(\S.*)", re.M)
    for name, value in find_public().items():
        if inspect.isclass(value):
            assert split.findall(inspect.getdoc(value)) == [], name


def check_arguments(function):
    signature = inspect.signature(function)
    _, _, listed = function.__doc__.partition("\n    Args:\n")
    for name in signature.parameters:
        entry = rf"^        (\*\*)?{name}: \S"
        assert re.search(entry, listed, re.MULTILINE), f"{function.__name__}: {name}"
    explained = bool(re.search(r"^    Returns: ?\S|^    Returns:\n +\S", listed, re.MULTILINE))
    assert explained == (signature.return_annotation not in (None, "None")), function.__name__
