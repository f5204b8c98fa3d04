"""Room on the disk, and recordings that are on it when they say so."""

import itertools

import numpy as np
import pytest
from typer.testing import CliRunner

from fluctua import insitu
from fluctua.cli.app import app
from fluctua.insitu.recording import disk
from fluctua.insitu.recording.writer import Writer


def head(times=400, channels=3, **changes):
    return insitu.files.Description(
        np.arange(float(times)), tuple(f"c{k}" for k in range(channels)), **changes
    )


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
    with insitu.files.create(path, description) as writer:
        for _ in range(count):
            writer.append(x, context or None)
    expected, true = disk.expected_bytes(description, count), path.stat().st_size
    assert true <= expected <= 1.1 * true + disk.HEAD


def test_what_does_not_fit_is_refused_before_it_begins(tmp_path, monkeypatch):
    path = tmp_path / "deep" / "r.nc"
    monkeypatch.setattr(disk, "free_bytes", lambda path: 2_000_000)
    with pytest.raises(ValueError, match=r"needed and 2 MB are free on its disk\. Record fewer"):
        insitu.files.create(path, head(), trajectories=1000)
    assert not path.parent.exists()
    with pytest.raises(ValueError, match="would not fit"):
        insitu.files.save(path, head(), np.zeros((1000, 400, 3)))
    with insitu.files.create(path, head(), trajectories=100) as writer:
        writer.append(np.zeros((400, 3)))
    with pytest.raises(ValueError, match="would not fit"):
        insitu.files.append_to(path, trajectories=1000)
    insitu.files.append_to(path, trajectories=100).close()
    insitu.files.append_to(path).close()  # nobody said how many
    monkeypatch.setattr(disk, "free_bytes", lambda path: 10)
    with pytest.raises(ValueError, match="written in a copy"):
        insitu.files.put_table(path, "noise", {"diffusion": 1.0})


def test_a_refused_replacement_leaves_the_old_file(tmp_path):
    path = tmp_path / "r.nc"
    options = [
        "record",
        str(path),
        "--set",
        "lattice.rows=1",
        "--set",
        "lattice.columns=2",
        "--set",
        "task.horizon=1",
        "--set",
        "task.dt=0.1",
        "--every",
        "1",
    ]
    assert CliRunner().invoke(app, [*options, "--trajectories", "2"]).exit_code == 0
    done = CliRunner().invoke(app, [*options, "--trajectories", "100000000000000", "--replace"])
    assert done.exit_code == 2
    assert "would not fit" in done.output
    with insitu.files.open(path) as r:
        assert r.count == 2
    assert CliRunner().invoke(app, [*options, "--trajectories", "3", "--replace"]).exit_code == 0


# --------------------------------------------------------------------------------------- power cuts

PAGE = 4096


@pytest.mark.long
def test_a_power_cut_takes_nothing_that_append_returned_from(tmp_path, monkeypatch):
    """A cut leaves any mixture of the pages at the last sync and of those written since; what
    counts must be whole.

    From the first trajectory on: before it there is nothing to lose, and the file may be one that
    cannot be opened."""
    description, rng = head(60, 6, dtype="complex64"), np.random.default_rng(0)
    path, syncs = tmp_path / "r.nc", []
    value = lambda n: np.full((60, 6), n + 1.0)
    real = Writer._sync

    def watched(self):
        syncs.append((path.read_bytes(), self.count))
        real(self)

    monkeypatch.setattr(Writer, "_sync", watched)
    with insitu.files.create(path, description, durable=True) as writer:
        for n in range(25):
            writer.append(value(n))
    assert len(syncs) == 1 + 2 * 25  # states, then the number that counts them
    tried = 0
    for (before, safe), (after, _) in itertools.pairwise(syncs):
        if not safe:
            continue
        pages = [
            k for k in range(0, len(after), PAGE) if before[k : k + PAGE] != after[k : k + PAGE]
        ]
        for _ in range(3):
            cut = bytearray(after)
            for k in pages:
                if rng.random() < 0.5:
                    old = before[k : k + PAGE]
                    cut[k : k + PAGE] = old.ljust(len(after[k : k + PAGE]), b"\0")
            (tmp_path / "cut.nc").write_bytes(cut)
            with insitu.files.open(tmp_path / "cut.nc") as r:
                assert r.count >= safe
                for n in range(r.count):
                    np.testing.assert_array_equal(r.x[n][:, :6], value(n))
            tried += 1
    assert tried == 3 * (2 * 24 - 1)


def test_syncs_are_as_frequent_as_asked(tmp_path, monkeypatch):
    seen = []
    real = Writer._sync
    monkeypatch.setattr(Writer, "_sync", lambda self: (seen.append(self.count), real(self)))
    for name, durable, times in (("never", False, 0), ("rarely", 1000.0, 1), ("always", True, 7)):
        seen.clear()
        with insitu.files.create(tmp_path / name, head(), durable=durable) as writer:
            for _ in range(3):
                writer.append(np.ones((400, 3)))
        assert len(seen) == times, name
    with insitu.files.append_to(tmp_path / "never", durable=True) as writer:
        assert writer.append(np.ones((400, 3))) == 3
    with pytest.raises(ValueError, match=r"`durable` .*-1"):
        insitu.files.create(tmp_path / "x", head(), durable=-1.0)
