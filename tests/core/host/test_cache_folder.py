"""The folder of compiled code is private, and folders of others stay as they are."""

import os
import stat

import pytest

from fluctua.core.host.cache_folder import make_private_folder


def read_mode(folder):
    return stat.S_IMODE(folder.stat().st_mode)


def test_a_new_folder_is_private(tmp_path):
    folder = make_private_folder(tmp_path / "a" / "b")
    assert folder == tmp_path / "a" / "b"
    assert read_mode(folder) == 0o700
    assert make_private_folder(folder) == folder


@pytest.mark.parametrize("mode", [0o755, 0o2775, 0o1777])
def test_an_open_folder_keeps_its_permissions(tmp_path, mode):
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(mode)
    folder = make_private_folder(shared)
    assert folder == shared / f"fluctua-{os.getuid()}"
    assert read_mode(shared) == mode
    assert read_mode(folder) & 0o777 == 0o700


def test_what_is_no_private_folder_is_refused(tmp_path):
    within = tmp_path / f"fluctua-{os.getuid()}"
    within.mkdir()
    within.chmod(0o777)
    tmp_path.chmod(0o755)
    with pytest.raises(PermissionError, match="only you can enter"):
        make_private_folder(tmp_path)
