"""The reference names what there is, and all that the top of the package exports."""

import importlib
import re
from pathlib import Path

import fluctua

DOCS = Path(__file__).resolve().parents[1] / "docs"
NAMES = re.findall(r"\.\. auto\w+:: (\S+)", (DOCS / "api.md").read_text())


def find(name):
    """The object of a dotted name, whose longest beginning that is a module is imported."""
    parts = name.split(".")
    for cut in range(len(parts) - 1, 0, -1):
        try:
            here = importlib.import_module(".".join(parts[:cut]))
        except ModuleNotFoundError:
            continue
        for part in parts[cut:]:
            here = getattr(here, part)
        return here
    raise AssertionError(name)


def test_every_name_of_the_reference_exists():
    for name in NAMES:
        assert find(name) is not None, name


def test_the_reference_names_all_that_is_public():
    public = {name for name in fluctua.__all__ if not name.startswith("_")}
    documented = {name.removeprefix("fluctua.") for name in NAMES if name.count(".") == 1}
    assert public - documented == set()


def test_pages_that_are_linked_exist():
    for page in DOCS.glob("*.md"):
        for target in re.findall(r"\]\(([\w./]+\.(?:md|png))\b", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name}: {target}"
