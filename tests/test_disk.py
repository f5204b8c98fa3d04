"""Room on the disk, and recordings that are on it when they say so."""

import numpy as np
import pytest
from typer.testing import CliRunner

from fluctua import insitu
from fluctua.cli import app
from fluctua.insitu import disk


def head(times=400, channels=3, **changes):
    return insitu.Description(np.arange(float(times)), tuple(f"c{k}" for k in range(channels)), **changes)


@pytest.mark.parametrize(
    ("description", "count"),
    [
        (head(), 50),
        (head(3000, 12, dtype="complex64"), 20),  # several chunks, the last one stored whole
        (head(20, 1, context={"phase": (), "sine": (7, 10)}), 500),
        (head(2, 1, dtype="float32"), 3),
    ],
)
def test_the_size_is_foreseen(tmp_path, description, count):
    """From above, and by no more than a tenth and what an empty file takes."""
    path = tmp_path / "r.nc"
    x = np.zeros((len(description.t), len(description.channels)), description.dtype)
    context = {name: np.zeros(shape) for name, shape in (description.context or {}).items()}
    with insitu.create(path, description) as writer:
        for _ in range(count):
            writer.append(x, context or None)
    told, true = disk.expected_bytes(description, count), path.stat().st_size
    assert true <= told <= 1.1 * true + disk.HEAD


def test_what_does_not_fit_is_refused_before_it_begins(tmp_path, monkeypatch):
    path = tmp_path / "deep" / "r.nc"
    monkeypatch.setattr(disk, "free_bytes", lambda path: 2_000_000)
    with pytest.raises(ValueError, match=r"needed and 2 MB are free on its disk\. Record fewer"):
        insitu.create(path, head(), trajectories=1000)
    assert not path.parent.exists()
    with pytest.raises(ValueError, match="would not fit"):
        insitu.save(path, head(), np.zeros((1000, 400, 3)))
    with insitu.create(path, head(), trajectories=100) as writer:
        writer.append(np.zeros((400, 3)))
    with pytest.raises(ValueError, match="would not fit"):
        insitu.append_to(path, trajectories=1000)
    insitu.append_to(path, trajectories=100).close()
    insitu.append_to(path).close()  # nobody said how many
    monkeypatch.setattr(disk, "free_bytes", lambda path: 10)
    with pytest.raises(ValueError, match="written in a copy"):
        insitu.put_table(path, "noise", {"diffusion": 1.0})


def test_a_refused_replacement_leaves_the_old_file(tmp_path):
    path = tmp_path / "r.nc"
    options = ["record", str(path), "--lattice", "1x2", "--horizon", "1", "--dt", "0.1", "--every", "1"]
    assert CliRunner().invoke(app, [*options, "--trajectories", "2"]).exit_code == 0
    done = CliRunner().invoke(app, [*options, "--trajectories", "100000000000000", "--replace"])
    assert done.exit_code == 2
    assert "would not fit" in done.output
    with insitu.open_recording(path) as r:
        assert r.count == 2
    assert CliRunner().invoke(app, [*options, "--trajectories", "3", "--replace"]).exit_code == 0
