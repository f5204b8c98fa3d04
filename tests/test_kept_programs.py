"""Programs of JAX that a command keeps for the next one."""

import os
import stat
import subprocess
import sys

import pytest

from fluctua.cli import kept_programs
from processes import environment_of_a_user

PROGRAM = """
from fluctua.cli.kept_programs import keep_programs
keep_programs()
import jax, jax.numpy as jnp
print(float(jax.jit(lambda x: jnp.sin(x) ** 2 + jnp.cos(x) ** 2)(0.3)))
"""


@pytest.fixture
def folder(monkeypatch, tmp_path):
    """The folder of programs of a user who has chosen nothing."""
    monkeypatch.setenv("FLUCTUA_KERNELS", str(tmp_path / "kernels"))
    for name in (kept_programs.FOLDER, kept_programs.SECONDS):
        monkeypatch.setenv(name, "")  # so that it is put back
        monkeypatch.delenv(name)
    return tmp_path / "kernels" / "jax"


def test_the_folder_is_private(folder):
    kept_programs.keep_programs()
    assert os.environ[kept_programs.FOLDER] == str(folder)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


@pytest.mark.parametrize("chosen", ["elsewhere", ""])
def test_the_choice_of_a_user_stays(folder, monkeypatch, chosen):
    monkeypatch.setenv(kept_programs.FOLDER, chosen)
    kept_programs.keep_programs()
    assert os.environ[kept_programs.FOLDER] == chosen
    assert not folder.exists()


@pytest.mark.parametrize(("maximum", "left"), [(2000, 1), (1999, 0)])
def test_a_large_folder_is_emptied(folder, monkeypatch, maximum, left):
    kept_programs.make_private_folder(kept_programs.make_private_folder(folder.parent) / "jax")
    (folder / "program").write_bytes(bytes(2000))
    monkeypatch.setattr(kept_programs, "MAX_BYTES", maximum)
    kept_programs.keep_programs()
    assert len(list(folder.iterdir())) == left


def test_nothing_is_kept_where_no_folder_can_be_made(folder):
    folder.parent.write_text("a file")
    kept_programs.keep_programs()
    assert kept_programs.FOLDER not in os.environ


def test_a_damaged_program_is_compiled_again(folder):
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM],
            env=environment_of_a_user(),
            capture_output=True,
            text=True,
            check=True,
        )
        assert float(done.stdout) == pytest.approx(1)
        assert not done.stderr
        programs = [path for path in folder.iterdir() if path.is_file()]
        assert programs
        for path in programs:
            path.write_bytes(path.read_bytes()[:100])
