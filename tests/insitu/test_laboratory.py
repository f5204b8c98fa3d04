"""The laboratory's how-to: its code runs against a bench, and every name in it exists."""

import importlib
import re
from pathlib import Path

import pytest

import fluctua
from fluctua.insitu.bench import device, server
from fluctua.insitu.bench.box import Bench

DOCS = Path(__file__).parents[2] / "docs"
SMALL = {
    "rectangular(3, 4)": "rectangular(2, 2)",
    "zeros(12)": "zeros(4)",
    "ones(17)": "ones(4)",
    "points=601": "points=51",
    "interval=0.01)": "interval=0.01, points=51)",
    "iterations=50": "iterations=1",
}


def blocks(name):
    return re.findall(r"```python\n(.*?)```", (DOCS / name).read_text(), re.DOTALL)


@pytest.mark.long
def test_the_code_of_the_laboratory_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    driver, *code = blocks("laboratory.md")
    assert "class MyInstrument" in driver  # the tests of the examples run that one
    text = "\n".join(code)
    for large, small in SMALL.items():
        assert large in text
        text = text.replace(large, small)
    with server.background(Bench(device.Sheet(rows=2, columns=2, seed=1))) as port:
        exec(text.replace("127.0.0.1:5025", f"127.0.0.1:{port}"), {})
    printed = capsys.readouterr().out
    assert "200 trajectories averaged; discarded: none" in printed
    assert (tmp_path / "runs" / "bench" / "final.npz").exists()


@pytest.mark.parametrize("name", ["laboratory.md", "virtual_bench.md"])
def test_every_name_of_the_library_in_the_text_exists(name):
    text = (DOCS / name).read_text()
    for dotted in set(re.findall(r"`fluctua((?:\.\w+)+)", text)):
        place = fluctua
        for part in dotted.split(".")[1:]:
            if not hasattr(place, part):
                importlib.import_module(f"{place.__name__}.{part}")
            place = getattr(place, part)
