"""Blocks that were zeroed, swapped or copied: states against their checksums, and heaps of
texts.
"""

import gzip
import re
from pathlib import Path

import h5py
import numpy as np
import pytest
from typer.testing import CliRunner

from fluctua import insitu
from fluctua.cli.app import app
from fluctua.insitu.recording import layout, texts
from forks import start_python

T = np.arange(12.0)
X = np.random.default_rng(0).normal(size=(6, 12, 2))
PHASE = np.linspace(1.0, 2.0, 6)
BLOCK = 64


def save_six(path, *, context=True):
    """Six trajectories of three chunks each."""
    head = insitu.files.Description(
        T, ("a", "b"), context={"phase": ()} if context else None, settings={"heater": 1.5}
    )
    insitu.files.save(path, head, X, {"phase": PHASE} if context else None)
    return path


@pytest.fixture
def path(tmp_path, monkeypatch):
    monkeypatch.setattr(layout, "CHUNK_BYTES", 64)
    return save_six(tmp_path / "r.nc")


# ------------------------------------------------------------------------------------------ states


def chunks(path):
    """[trajectory, place, bytes] of every chunk of the states."""
    with h5py.File(path) as file:
        data = file["x"].id
        found = [data.get_chunk_info(k) for k in range(data.get_num_chunks())]
    return [(c.chunk_offset[0], c.byte_offset, c.size) for c in found]


def zero_blocks(data, one, other):
    data[one[1] : one[1] + one[2]] = bytes(one[2])
    return {one[0]}


def swap_blocks(data, one, other):
    here, there = (slice(c[1], c[1] + c[2]) for c in (one, other))
    kept = bytes(data[here])
    data[here] = data[there]
    data[there] = kept
    return {one[0], other[0]}


def duplicate_block(data, one, other):
    data[other[1] : other[1] + other[2]] = data[one[1] : one[1] + one[2]]
    return {other[0]}


def read_whole(recording):
    recording.trajectories(load=True)


def read_steps(recording):
    recording.x[:, 3:4]


def read_stretches(recording):
    recording.cut(4).trajectories(load=True)


@pytest.mark.parametrize("fault", [zero_blocks, swap_blocks, duplicate_block])
def test_every_damaged_chunk_is_named_with_its_trajectories(path, fault):
    """HDF5's checksum of a chunk goes with the chunk, and that of zeros is zero."""
    before = path.read_bytes()
    places = chunks(path)
    assert len(places) == 18
    for k, one in enumerate(places):
        data = bytearray(before)
        wrong = sorted(fault(data, one, places[(k + 4) % len(places)]))
        path.write_bytes(data)
        every = f"trajector(y|ies) {', '.join(map(str, wrong))} are not what was written"
        first = f"trajector(y|ies) {wrong[0]}(,| are) "  # stretches are read one after the other
        for read, named in ((read_whole, every), (read_steps, every), (read_stretches, first)):
            with insitu.files.open(path) as recording, pytest.raises(ValueError, match=named):
                read(recording)
        with insitu.files.open(path, damaged=True) as recording:
            (finding,) = [f for f in insitu.files.inspect(recording).findings if f.serious]
            copy = path.with_name(f"{k}.nc")
            assert insitu.files.convert(recording, copy) == (6 - len(wrong), (), tuple(wrong))
        assert finding.what == "damaged"
        assert f"{len(wrong)} trajector" in finding.text
        with insitu.files.open(copy) as recording:
            np.testing.assert_array_equal(recording.x[:], np.delete(X, wrong, axis=0))


def test_a_chunk_that_hdf5_refuses_is_named_too(path):
    data = bytearray(path.read_bytes())
    data[chunks(path)[4][1]] ^= 1
    path.write_bytes(data)
    with (
        insitu.files.open(path) as recording,
        pytest.raises(ValueError, match="states of trajectory 1 are not"),
    ):
        read_whole(recording)


@pytest.mark.parametrize("context", [True, False])
def test_trajectories_that_changed_places_with_their_checksums_are_noticed(tmp_path, context):
    """The upper half of a checksum is that of the number, so that it does not belong to another
    place.
    """
    path = save_six(tmp_path / "r.nc", context=context)
    with h5py.File(path, "r+", **layout.WRITING) as file:
        for name in ("x", "checksum", *(["context/phase"] if context else [])):
            file[name][2:4] = file[name][2:4][::-1]
    with (
        insitu.files.open(path) as recording,
        pytest.raises(ValueError, match="trajector(y 2|ies 2, 3) "),
    ):
        read_whole(recording)


@pytest.mark.parametrize("lost", ["zeroed", "missing"])
def test_checksums_that_are_lost_are_damage(tmp_path, lost):
    path = save_six(tmp_path / "r.nc", context=False)
    with h5py.File(path, "r+", **layout.WRITING) as file:
        if lost == "zeroed":
            file["checksum"][:] = 0
        else:
            file["checksum"].resize(2, axis=0)
    named = "0, 1, 2, 3, 4, 5 are not what" if lost == "zeroed" else "/checksum has 2"
    with pytest.raises(ValueError, match=named), insitu.files.open(path) as recording:
        read_whole(recording)


def test_a_trajectory_is_checked_once(path, monkeypatch):
    counted = []
    with insitu.files.open(path) as recording:
        recording.x[2:4]
        monkeypatch.setattr(recording.x._data, "_compare", lambda found: counted.extend(found))
        recording.x[2:4]
        recording.x[:, 1:5]
    assert counted == [0, 1, 4, 5]


def test_no_command_uses_states_that_are_not_what_was_written(tmp_path):
    path = tmp_path / "r.nc"
    options = [
        "--set",
        "lattice.rows=1",
        "--set",
        "lattice.columns=2",
        "--set",
        "task.horizon=1",
        "--set",
        "task.dt=0.1",
        "--trajectories",
        "20",
    ]
    assert CliRunner().invoke(app, ["record", str(path), *options]).exit_code == 0
    data = bytearray(path.read_bytes())
    swap_blocks(data, *chunks(path)[3:5])
    path.write_bytes(data)
    for command in (["estimate"], ["estimate", "--baseline", "optimal"], ["calibrate"], ["advise"]):
        done = CliRunner().invoke(app, [command[0], str(path), *command[1:]])
        assert done.exit_code == 2, done.output
        assert re.search(r"trajector(y 3|ies 3, 4) are not what was written", done.output)
    done = CliRunner().invoke(app, ["inspect", str(path)])
    assert done.exit_code == 1
    assert "2 trajectories of 20 cannot be used" in done.output
    done = CliRunner().invoke(app, ["convert", str(path), str(tmp_path / "copy.nc")])
    assert done.exit_code == 0
    assert "lost, damaged: 2 trajectories (3, 4)" in done.output


# ------------------------------------------------------------------------------------------- texts


def format_1(folder):
    """A recording of the format before: events, context, and texts of variable length."""
    path = folder / "old.nc"
    path.write_bytes(gzip.decompress(Path(__file__).with_name("format_1.nc.gz").read_bytes()))
    return path


def test_files_of_format_1_are_read_continued_and_copied(tmp_path):
    path = format_1(tmp_path)
    with insitu.files.open(path) as recording:
        d = recording.description
        assert (d.channels, d.units, d.time_units, d.provenance) == (
            ("molecules",),
            "1",
            "s",
            "written in format 1",
        )
        assert (d.network["frame"], d.events.names) == ("rotating", ("birth", "death"))
        assert insitu.files.inspect(recording).findings == []
        x = recording.x[:]
        events = recording.trajectories().events
        one = [leaf[:1][0] for leaf in events]
        insitu.files.convert(recording, tmp_path / "new.nc")
    assert x[:, -1, 0].tolist() == [6.0, 5.0, 5.0]
    with insitu.files.append_to(path) as writer:
        assert writer.append(x[0], {"phase": 3.0}, one) == 3
    insitu.files.put_table(path, "noise", {"transition": "euler"})
    insitu.files.put_table(path, "noise", {"transition": "local-linear"})
    with insitu.files.open(path) as recording:
        assert (recording.count, recording.description.noise["transition"]) == (4, "local-linear")
    with insitu.files.open(tmp_path / "new.nc") as recording:
        np.testing.assert_array_equal(recording.x[:], x)
        assert recording.description.network["frame"] == "rotating"


def test_texts_of_new_files_have_a_fixed_length(path):
    insitu.files.put_table(path, "noise", {"transition": "euler"})
    found = set()

    def look(name, item):
        if isinstance(item, h5py.Dataset):
            assert not texts._is_variable(item.id.get_type()), name
        for attribute in item.attrs:
            if texts._is_variable(h5py.h5a.open(item.id, attribute.encode()).get_type()):
                found.add(attribute)

    with h5py.File(path) as file:
        look("", file)
        file.visititems(look)
    assert found == {texts.DIMENSIONS}  # as netCDF has it


ZEROES = """
import signal, sys
from pathlib import Path
from fluctua import insitu

path, block = Path(sys.argv[1]), int(sys.argv[2])
before = path.read_bytes()
start = before.index(b"GCOL")
for place in range(start - start % block, start + 4096, block):
    data = bytearray(before)
    data[place : place + block] = bytes(block)
    if data == before:
        continue
    path.write_bytes(data)
    print(place, end=" ", flush=True)
    signal.alarm(20)  # ends the process, HDF5's loop too
    try:
        with insitu.files.open(path) as recording:
            recording.trajectories(load=True)
        print("passed", flush=True)
    except ValueError as error:
        print(error, flush=True)
    signal.alarm(0)
"""


def zero_blocks_of_heap(path):
    """What is said of a file with each block of its first heap zeroed in turn."""
    child = start_python(ZEROES, path, BLOCK)
    printed, errors = child.communicate()
    lines = printed.splitlines()
    assert child.returncode == 0, f"HDF5 hangs at byte {lines[-1]}\n{errors}"
    return lines


@pytest.mark.long
@pytest.mark.parametrize("version", [1, 2])
def test_no_zeroed_block_of_a_heap_hangs(tmp_path, version):
    """Free space of length 0 is stepped over for ever by HDF5."""
    path = format_1(tmp_path) if version == 1 else save_six(tmp_path / "new.nc")
    lines = zero_blocks_of_heap(path)
    refused = [line for line in lines if "is damaged" in line]
    assert len(refused) >= 3
    expected = (
        r"of its texts cannot be read \(attribute"
        if version == 1
        else "the axes of /.* have lost their names"
    )
    assert all(
        re.search(expected + "|cannot be opened|bad global heap|Unable|not what was written", line)
        for line in refused
    ), lines
    assert any(re.search(expected, line) for line in refused)


def broken_heap(path):
    """Zero the header of the second object of the first heap."""
    data = bytearray(path.read_bytes())
    heap = data.index(b"GCOL")
    length = int.from_bytes(data[heap + 24 : heap + 32], "little")
    place = heap + 32 + -(-length // 8) * 8
    data[place : place + 16] = bytes(16)
    path.write_bytes(data)
    return path


def test_a_new_file_with_a_damaged_heap_loses_nothing(tmp_path):
    path = broken_heap(save_six(tmp_path / "r.nc"))
    for change in (
        insitu.files.append_to,
        insitu.files.repair,
        lambda p: insitu.files.put_table(p, "noise", {"diffusion": 1.0}),
    ):
        with pytest.raises(ValueError, match="the axes of /.* have lost their names"):
            change(path)
    with insitu.files.open(path, damaged=True) as recording:
        assert insitu.files.convert(recording, tmp_path / "copy.nc") == (6, (), ())
    with insitu.files.open(tmp_path / "copy.nc") as recording:
        np.testing.assert_array_equal(recording.x[:], X)


def test_the_numbers_of_an_old_file_with_a_damaged_heap_can_be_saved(tmp_path):
    path = broken_heap(format_1(tmp_path))
    copy = tmp_path / "copy.nc"
    for command in (["inspect"], ["estimate"], ["calibrate"], ["advise"], ["convert", str(copy)]):
        done = CliRunner().invoke(app, [command[0], str(path), *command[1:]])
        assert done.exit_code == 2, done.output
        assert "of its texts cannot be read (attribute" in done.output.replace("\n", " ")
    done = CliRunner().invoke(
        app, ["convert", str(path), str(copy), "--map", "x=x", "--map", "t=time"]
    )
    assert done.exit_code == 0, done.output
    with insitu.files.open(copy) as recording:
        assert recording.x[:, -1, 0].tolist() == [6.0, 5.0, 5.0]
