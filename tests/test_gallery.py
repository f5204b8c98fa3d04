"""The gallery: all examples are in it, under a title and one sentence, and run as it states."""

import ast
import re
import runpy
import shlex
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
PAGE = (ROOT / "docs" / "gallery.md").read_text()


def test_every_example_is_in_one_group():
    listed = re.findall(r"\.\./examples/(\w+)\.py", PAGE)
    assert sorted(listed) == [path.stem for path in EXAMPLES]


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_has_a_title_one_sentence_and_a_picture(path):
    """sphinx-gallery takes the card of an example from its docstring, and figures that are open."""
    source = path.read_text()
    title, sentence, *_ = ast.get_docstring(ast.parse(source)).split("\n\n")
    name, line = title.split("\n")
    assert line == "=" * len(name)
    assert len(name) <= 30  # one line of a card
    assert re.fullmatch(r"[^\n]{20,105}\.", sentence)
    assert len(re.findall(r"\.(\s|$)", sentence)) == 1
    assert "plt.show()" in source


@pytest.fixture(scope="module")
def settings():
    return runpy.run_path(str(ROOT / "docs" / "gallery_settings.py"))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_arguments_are_those_of_the_page(path, settings):
    arguments = settings["choose_arguments"]({}, {"src_file": str(path)})
    if path.stem in settings["NEEDS_FOLDER"]:
        assert not Path(arguments[0]).is_relative_to(ROOT)
        return
    stated = re.search(r"gallery ran\s+`python examples/(\w+)\.py ([^`]*)`", path.read_text())
    if "the gallery ran" in path.read_text():
        assert stated[1] == path.stem
        assert arguments == shlex.split(stated[2])
        assert all(f'"{name}"' in path.read_text() for name in arguments if name[0] == "-")
    else:
        assert arguments == []


def test_functions_of_the_settings_are_found_by_their_names(monkeypatch, settings):
    """Sphinx keeps settings between builds, so functions are in them by name."""
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    conf = settings["sphinx_gallery_conf"]
    for name in (conf["reset_argv"], conf["reset_modules"][1]):
        module, function = name.split(".")
        assert callable(getattr(__import__(module), function))
    monkeypatch.delitem(sys.modules, "gallery_settings")
