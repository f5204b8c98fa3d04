"""Code by name: FILE.py:NAME and package.module:NAME, with one loader."""

import sys

import pytest

from fluctua.learn.training import Training
from fluctua.store.code import call_code, is_code, load_code, load_value, make_absolute


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "lab.py").write_text("import beside\nanswer = beside.answer\ndef fail(): 1 / 0\n")
    (tmp_path / "beside.py").write_text("answer = 42\n")
    (tmp_path / "broken.py").write_text("import math\n\nmath.sqrt(-1)\n")
    (tmp_path / "needs.py").write_text("import no_such_package\n")
    (tmp_path / "own_traps").mkdir()
    (tmp_path / "own_traps" / "__init__.py").touch()
    (tmp_path / "own_traps" / "first.py").write_text("answer = 43\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    known = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - known:
        del sys.modules[name]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("lab.py:trap", True),
        ("/some where/lab.py:trap", True),
        ("lab.py", True),
        ("lab:trap", True),
        ("package.lab:Trap", True),
        ("tcp://127.0.0.1:5025", False),
        ("TCPIP0::127.0.0.1::5025::SOCKET", False),
        ("GPIB0::12::INSTR", False),
        ("localhost:5025", False),
        ("demo", False),
        ("small.toml", False),
    ],
)
def test_a_name_of_code_is_no_address(text, expected):
    assert is_code(text) is expected


def test_files_and_modules_are_loaded(folder):
    assert load_code("lab.py:answer", "a number") == 42  # with the module beside it
    assert load_code(f"{folder}/lab.py:answer", "a number") == 42
    assert load_code("own_traps.first:answer", "a number") == 43
    assert make_absolute("lab.py:answer") == f"{folder.resolve()}/lab.py:answer"
    assert make_absolute("own_traps.first:answer") == "own_traps.first:answer"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("lap.py:answer", r'no file lap.py: a number.*FILE.py:NAME.*Did you mean "lab.py"\?'),
        ("lab.py:anser", r"lab.py does not define 'anser', .* a number.*\"answer\"\?"),
        ("lab.py", r"'lab.py' names no object: a number .* such as lab.py:NAME"),
        ("broken.py:answer", r"broken.py does not run: ValueError, line 3 of broken.py: "),
        ("broken:answer", r"broken does not run: ValueError, line 3 of broken.py: "),
        ("needs:answer", r"ModuleNotFoundError, line 1 of needs.py: No module.*no_such_package"),
        ("own_trapz.first:answer", r'no module own_trapz: .* Did you mean "own_traps"\?'),
        (
            "own_traps.frist:answer",
            r'no module own_traps.frist: .* Did you mean "own_traps.first"\?',
        ),
        ("own_traps.first:x", "own_traps.first does not define 'x'"),
    ],
)
def test_what_is_not_there_is_named(folder, text, message):
    with pytest.raises(ValueError, match=message):
        load_code(text, "a number")


def test_a_value_of_another_kind_is_refused(folder):
    with pytest.raises(TypeError, match=r"lab.py:answer must be a Training, .*; got int"):
        load_value("lab.py:answer", Training, "a Training")
    with pytest.raises(ValueError, match=r"lab.py:fail does not run: ZeroDivisionError, line 3 of"):
        load_value("lab.py:fail", Training, "a Training")


def test_the_library_explains_itself_without_a_line():
    with pytest.raises(ValueError, match=r"^'x.py' names no object"):
        call_code("fluctua.store.code:load_code", load_code, "x.py", "a number")
