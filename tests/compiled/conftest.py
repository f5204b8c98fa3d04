import pytest


@pytest.fixture(autouse=True)
def kernels(tmp_path_factory, monkeypatch):
    """Kernels of a test session are kept in a folder of its own, and compiled quickly."""
    folder = tmp_path_factory.getbasetemp() / "kernels"
    monkeypatch.setenv("FLUCTUA_KERNELS", str(folder))
    monkeypatch.setattr("fluctua.compiled.kernels.OPTIMISE", "-O1")
    return folder
