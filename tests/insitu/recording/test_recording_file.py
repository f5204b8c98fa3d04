"""The file format: round trips, other programs' files, damage, and writers that are killed."""

import os
import shutil
import subprocess
import sys

import h5py
import numpy as np
import pytest
import xarray as xr
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from fluctua import insitu, tcmt
from fluctua.insitu.recording import ownership
from fluctua.insitu.recording.foreign import KNOWN
from fluctua.insitu.recording.model import build_task, tabulate_task
from forks import start_python

T = np.array([0.0, 0.1, 0.3])


def simple(**changes):
    return insitu.files.Description(**{"t": T, "channels": ("a", "b"), **changes})


# -------------------------------------------------------------------------------------- round trips


@pytest.mark.parametrize("step", ["euler", "heun"])
def test_a_recording_says_by_which_steps_its_network_is_meant(step):
    task = tcmt.transmission(tcmt.rectangular(1, 2), horizon=0.3, dt=0.1, integrator=step)
    head = insitu.files.Description(
        t=task.t, channels=("a", "b"), dtype="complex64", **tabulate_task(task)
    )
    assert ("step" in head.network) == (
        step == "heun"
    )  # files of before say nothing, and are Euler's
    assert build_task(head).process == task.process
    assert build_task(head).objective == task.objective


NAME = st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,8}", fullmatch=True)
TEXT = st.text(
    st.characters(codec="utf-8", exclude_characters="\0", exclude_categories=["Cs"]), max_size=20
)
ARRAY = hnp.arrays(np.float64, hnp.array_shapes(min_dims=0, max_dims=3, max_side=3))
TABLE = st.dictionaries(NAME, ARRAY | TEXT, max_size=3)


@st.composite
def recordings(draw):
    times, width, count = draw(st.integers(2, 5)), draw(st.integers(1, 3)), draw(st.integers(0, 4))
    dtype = draw(st.sampled_from(["float32", "float64", "complex64", "complex128"]))
    any_number = {"allow_nan": True, "allow_infinity": True}
    states = hnp.arrays(
        dtype, (count, times, width), elements=hnp.from_dtype(np.dtype(dtype), **any_number)
    )
    shapes = draw(
        st.none()
        | st.dictionaries(NAME, hnp.array_shapes(min_dims=0, max_dims=2, max_side=3), max_size=2)
    )
    description = insitu.files.Description(
        t=np.cumsum(draw(hnp.arrays(np.float64, times, elements=st.floats(1e-3, 10.0)))),
        channels=tuple(
            draw(st.lists(TEXT.filter(bool), min_size=width, max_size=width, unique=True))
        ),
        dtype=dtype,
        units=draw(TEXT),
        time_units=draw(TEXT),
        context=shapes,
        parameters=draw(TABLE),
        settings=draw(TABLE),
        drive=draw(TABLE),
        noise=draw(TABLE),
        provenance=draw(TEXT),
    )
    context = {
        name: np.asarray(draw(hnp.arrays(np.float64, (count, *shape))))
        for name, shape in (shapes or {}).items()
    }
    return description, draw(states), context


@settings(max_examples=40)
@given(recordings())
def test_round_trip(tmp_path, recording):
    description, x, context = recording
    path = tmp_path / "r.nc"
    path.unlink(missing_ok=True)
    insitu.files.save(path, description, x, context)
    with insitu.files.open(path) as back:
        for name in (
            "channels",
            "dtype",
            "units",
            "time_units",
            "context",
            "provenance",
            "software",
            "created",
        ):
            assert getattr(back.description, name) == getattr(description, name), name
        np.testing.assert_array_equal(back.t, description.t)
        for table in ("parameters", "settings", "drive", "noise"):
            ours, theirs = getattr(description, table), getattr(back.description, table)
            assert set(ours) == set(theirs)
            for name in ours:
                np.testing.assert_array_equal(theirs[name], ours[name])
        assert back.count == len(x)
        whole = np.concatenate([x.real, x.imag], axis=-1) if description.is_complex else x
        np.testing.assert_array_equal(back.x[:], whole)
        assert (back.context is None) == (not description.context)
        for name, rows in (back.context or {}).items():
            np.testing.assert_array_equal(rows, context[name])


def test_xarray_and_plain_h5py_read_it(tmp_path):
    x = np.random.default_rng(0).normal(size=(4, 3, 2)) + 1j
    path = tmp_path / "r.nc"
    theta = {"omega": np.arange(5.0), "k": 0.3}
    insitu.files.save(
        path,
        simple(
            dtype="complex128", units="V", time_units="s", context={"phase": ()}, parameters=theta
        ),
        x,
        {"phase": np.arange(4.0)},
    )
    with xr.open_dataset(path, engine="h5netcdf") as data:
        assert data.x.dims == ("trajectory", "time", "channel")
        assert data.x.attrs["units"] == "V"
        np.testing.assert_array_equal(data.x.values, x)
        np.testing.assert_array_equal(data.time, T)
        assert data.channel.values.tolist() == ["a", "b"]
        assert data.attrs["format"] == "fluctua-recording"
    with xr.open_dataset(path, engine="h5netcdf", group="parameters") as data:
        np.testing.assert_array_equal(data.omega, np.arange(5.0))
        assert float(data.k) == 0.3
    with h5py.File(path) as file:
        np.testing.assert_array_equal(file["x"][:], x)
        np.testing.assert_array_equal(file["context/phase"][:], np.arange(4.0))


def test_states_are_sliced_like_arrays(tmp_path):
    x = np.random.default_rng(1).normal(size=(5, 3, 2))
    insitu.files.save(tmp_path / "r.nc", simple(), x)
    with insitu.files.open(tmp_path / "r.nc") as r:
        for key in (
            slice(1, 3),
            (slice(None), slice(0, 2)),
            (slice(None, None, 2), -1),
            4,
            (2, 1),
            (slice(None), 0, 1),
        ):
            np.testing.assert_array_equal(r.x[key], x[key])
        with pytest.raises(IndexError, match="outside 0…4"):
            r.x[5]
        with pytest.raises(TypeError, match="sliced by trajectory"):
            r.x[np.array([0, 1])]


def test_appending_checks_what_comes(tmp_path):
    with insitu.files.create(tmp_path / "r.nc", simple(context={"phase": ()})) as writer:
        with pytest.raises(ValueError, match=r"\(3, 2\) \(times, channels\); got \(2, 2\)"):
            writer.append(np.zeros((2, 2)), {"phase": 0.0})
        with pytest.raises(ValueError, match="is phase; got nothing"):
            writer.append(np.zeros((3, 2)))
        with pytest.raises(TypeError, match="holds float64; got complex128"):
            writer.append(np.zeros((3, 2), complex), {"phase": 0.0})
        assert writer.append(np.ones((3, 2)), {"phase": 1.0}) == 0
    with pytest.raises(ValueError, match="exists. Append"):
        insitu.files.create(tmp_path / "r.nc", simple())
    with insitu.files.append_to(tmp_path / "r.nc") as writer:
        assert writer.append(np.ones((3, 2)), {"phase": 2.0}) == 1
    with insitu.files.open(tmp_path / "r.nc") as r:
        assert r.context["phase"].tolist() == [1.0, 2.0]


# -------------------------------------------------------------------------------------------- kills

KILLS = """
import os, random, signal, struct, sys, time
import h5py, numpy as np
from fluctua.insitu.recording.description import Description
from fluctua.insitu.recording.reader import open_recording
from fluctua.insitu.recording.writer import append_to, create, repair

path, rounds = sys.argv[1], int(sys.argv[2])
random.seed(5)
t = np.linspace(0, 1, 700)  # several chunks a trajectory
trajectory = lambda n: (n + 1) * (np.arange(700.0)[:, None] + np.arange(40)) + 0j
create(path, Description(t, tuple(map(str, range(40))), "complex64", context={"n": ()})).close()
total = 0
for _ in range(rounds):
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        writer = append_to(path)
        os.write(write, struct.pack("q", writer.count))
        while True:
            n = writer.append(trajectory(writer.count), {"n": float(writer.count)})
            os.write(write, struct.pack("q", n + 1))
    os.read(read, 8)
    time.sleep(random.uniform(0, 0.06))
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    os.close(write)
    reported = total
    while word := os.read(read, 8):
        (reported,) = struct.unpack("q", word)
    os.close(read)
    with open_recording(path) as r:  # as the kill left it
        assert reported <= r.count <= reported + 1, (reported, r.count)
        assert r.interrupted
        for n in range(total, r.count):
            assert np.array_equal(r.x[n][:, :40], trajectory(n).real.astype("f4")), n
        assert np.array_equal(r.context["n"], np.arange(r.count))
        total = r.count
    assert repair(path)
    with h5py.File(path) as file:  # and any program afterwards
        assert file["x"].shape[0] == file["trajectory"].shape[0] == total
print(total)
"""


@pytest.mark.long
@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks writers to kill them")
def test_killed_writers_lose_nothing_that_was_written(tmp_path):
    child = start_python(KILLS, tmp_path / "r.nc", 15)
    printed, errors = child.communicate(timeout=120)
    assert child.returncode == 0, errors
    assert int(printed) >= 15  # the kills fell between and within trajectories


TORN_WRITE = r"""
#include <dlfcn.h>
#include <stdlib.h>
#include <unistd.h>

static long crossings = 0;

extern "C" ssize_t pwrite64(int file, const void* data, size_t size, off64_t begin) {
  using Write = ssize_t (*)(int, const void*, size_t, off64_t);
  static const Write write_all = (Write)dlsym(RTLD_NEXT, "pwrite64");
  const off64_t page_end = (begin / 4096 + 1) * 4096;
  const char* torn = getenv("TORN_WRITE");
  if (torn && page_end < begin + (off64_t)size && ++crossings == atol(torn)) {
    write_all(file, data, page_end - begin, begin);
    _exit(9);
  }
  return write_all(file, data, size, begin);
}

extern "C" ssize_t pwrite(int file, const void* data, size_t size, off_t begin) {
  return pwrite64(file, data, size, begin);
}
"""
"""Ends a program between two pages of a write, as the kernel does when a kill arrives there."""

TORN = """
import os, sys
import numpy as np
from fluctua.insitu.recording.description import Description
from fluctua.insitu.recording.reader import open_recording
from fluctua.insitu.recording.writer import create, repair

head = Description(np.linspace(0, 1, 70), ("a", "b", "c", "d"), "complex64", context={"n": ()})
trajectory = lambda n: np.full((70, 4), n + 1j)
for torn in range(78, 104):  # of a file whose parts are not aligned to pages, 6 would not open
    path = os.path.join(sys.argv[1], f"{torn}.nc")
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(read)
        os.environ["TORN_WRITE"] = str(torn)
        writer = create(path, head)
        for _ in range(500):
            os.write(write, bytes(writer.append(trajectory(writer.count), {"n": 0.5}) >= 0))
        os._exit(3)  # no write was torn
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        reported = len(pipe.read())
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 9
    with open_recording(path) as r:
        assert reported <= r.count <= reported + 1, (torn, reported, r.count)
        for n in range(r.count):
            assert np.array_equal(r.x[n][:, :4], trajectory(n).real), (torn, n)
    assert repair(path)
print(reported)
"""


@pytest.mark.skipif(
    sys.platform != "linux" or shutil.which("g++") is None,
    reason="replaces a function of Linux's C library, which takes g++",
)
def test_a_kill_between_two_pages_of_a_write_loses_nothing(tmp_path):
    """A part of HDF5's index that lies across two pages would fail its checksum for ever."""
    source = tmp_path / "torn.cpp"
    source.write_text(TORN_WRITE)
    library = tmp_path / "torn.so"
    subprocess.run(
        ["g++", "-D_GNU_SOURCE", "-shared", "-fPIC", source, "-o", library, "-ldl"], check=True
    )
    done = subprocess.run(
        [sys.executable, "-c", TORN, tmp_path],
        env={**os.environ, "LD_PRELOAD": str(library)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 10  # the index of so many has parts of several sizes


def test_a_live_writer_is_not_repaired_away(tmp_path):
    code = (
        "import sys, numpy as np; from fluctua.insitu.recording.description import Description; "
        "from fluctua.insitu.recording.writer import create; w = create(sys.argv[1], "
        "Description([0, 1], ('a',))); "
        "w.append(np.ones((2, 1))); print('ready', flush=True); sys.stdin.read()"
    )
    path = tmp_path / "r.nc"
    child = start_python(code, path)
    try:
        assert child.stdout.readline() == "ready\n"
        with insitu.files.open(path) as r:  # a look while it is written
            assert (r.count, r.interrupted) == (1, True)
        with pytest.raises(ValueError, match=f"being written by process {child.pid}"):
            insitu.files.append_to(path)
    finally:
        child.communicate("")
    with insitu.files.open(path) as r:
        assert not r.interrupted


def test_checksum_is_that_of_hdf5(tmp_path):
    """lookup3 of the published test vector, and of a superblock that HDF5 wrote."""
    assert ownership.lookup3(b"Four score and seven years ago") == 0x17770551
    with h5py.File(tmp_path / "x.h5", "w", libver=("v110", "v110")) as file:
        file["a"] = 1
    head = (tmp_path / "x.h5").read_bytes()[:48]
    assert ownership.lookup3(head[:44]).to_bytes(4, "little") == head[44:]


# ------------------------------------------------------------------------------ foreign and damaged


def test_npz_by_convention_and_by_mapping(tmp_path):
    x = np.random.default_rng(2).normal(size=(4, 3, 2))
    np.savez(
        tmp_path / "a.npz",
        x=x,
        t=T,
        channels=["u", "v"],
        **{"parameters.k": 0.5, "context.phase": np.arange(4.0)},
    )
    with insitu.files.open(tmp_path / "a.npz") as r:
        assert (r.kind, r.description.channels, float(r.description.parameters["k"])) == (
            "npz",
            ("u", "v"),
            0.5,
        )
        np.testing.assert_array_equal(r.x[:], x)
        np.testing.assert_array_equal(r.context["phase"], np.arange(4.0))
    np.savez(tmp_path / "b.npz", psi=x + 2j, clock=T)
    with pytest.raises(ValueError, match=r"no `x`, the states .* it has psi, clock.*--map x=PLACE"):
        insitu.files.open(tmp_path / "b.npz")
    with insitu.files.open(tmp_path / "b.npz", {"x": "psi", "t": "clock"}) as r:
        assert r.x.shape == (4, 3, 4)
        np.testing.assert_array_equal(r.x[0, :, 2:], np.full((3, 2), 2.0))
    with pytest.raises(ValueError, match="no 'Psi' for x; it has psi, clock"):
        insitu.files.open(tmp_path / "b.npz", {"x": "Psi", "t": "clock"})
    with pytest.raises(ValueError, match=f"a mapping names {', '.join(KNOWN)}"):
        insitu.files.open(tmp_path / "b.npz", {"y": "psi"})


def matlab(path, **variables):
    """A file laid out as MATLAB's save(..., '-v7.3') does: a user block, axes in reverse,
    structs as groups.
    """
    with h5py.File(path, "w", userblock_size=512) as file:
        for name, value in variables.items():
            value = np.asarray(value)
            if value.dtype.kind == "c":
                pair = np.empty(value.shape, [("real", "f8"), ("imag", "f8")])
                pair["real"], pair["imag"] = value.real, value.imag
                value = pair
            if value.dtype.kind == "U":
                value = np.array([list(map(ord, str(value)))], np.uint16)
            file[name] = value.T
    with open(path, "r+b") as file:
        file.write(
            b"MATLAB 7.3 MAT-file, Platform: GLNXA64, Created on: Mon Jan 1".ljust(116)
            + b" " * 8
            + b"\x00\x02IM"
        )


def test_matlab_v73(tmp_path):
    x = np.random.default_rng(3).normal(size=(4, 3, 2)) * (1 + 1j)
    matlab(
        tmp_path / "a.mat",
        x=x,
        t=T[None],
        units="V",
        **{"parameters/k": [[0.5]], "context/phase": np.arange(4.0)[:, None]},
    )
    with insitu.files.open(tmp_path / "a.mat") as r:
        assert (r.kind, r.description.units, r.x.shape) == ("MATLAB v7.3", "V", (4, 3, 4))
        assert float(r.description.parameters["k"]) == 0.5
        np.testing.assert_array_equal(r.x[1:3], np.concatenate([x.real, x.imag], -1)[1:3])
        np.testing.assert_array_equal(r.x[:, 1:3], np.concatenate([x.real, x.imag], -1)[:, 1:3])
        np.testing.assert_array_equal(r.context["phase"], np.arange(4.0))


def test_matlab_v73_by_another_writer(tmp_path):
    """hdf5storage writes what MATLAB's own load takes: cells as references, text as UTF-16, row
    vectors.
    """
    x = np.random.default_rng(4).normal(size=(4, 3, 2)) * (1 - 2j)
    variables = {
        "x": x,
        "t": np.asarray(T)[:, None],
        "channels": np.array([["left", "right"]], dtype=object),
        "units": "µV",
        "parameters": {"omega": np.array([[1.0, 2.0, 3.0]])},
        "context": {"phase": np.arange(4.0)[:, None]},
    }
    path = str(tmp_path / "a.mat")
    hdf5storage = pytest.importorskip("hdf5storage")
    hdf5storage.savemat(
        path, variables, format="7.3", store_python_metadata=False, matlab_compatible=True
    )
    with insitu.files.open(path) as r:
        assert (r.kind, r.description.units, r.description.channels) == (
            "MATLAB v7.3",
            "µV",
            ("left", "right"),
        )
        np.testing.assert_array_equal(r.description.parameters["omega"], [1.0, 2.0, 3.0])
        np.testing.assert_array_equal(r.x[:], np.concatenate([x.real, x.imag], -1))
        np.testing.assert_array_equal(r.context["phase"], np.arange(4.0))


def damage_file(path, how):
    if how == "missing":
        return "there is no file"
    if how == "empty":
        path.write_bytes(b"")
        return "is empty"
    if how == "text":
        path.write_text("time,psi\n0,1\n")
        return "neither HDF5 .* nor .npz"
    if how == "zip":
        path.write_bytes(b"PK\x05\x06" + b"\0" * 18)
        return "has no `x`"
    if how == "foreign":
        with h5py.File(path, "w") as file:
            file["spectrum"] = np.zeros(3)
        return "has no `x`.*it has spectrum"
    insitu.files.save(path, simple(), np.ones((50, 3, 2)))
    whole = path.read_bytes()
    if how == "cut":
        path.write_bytes(whole[: len(whole) // 2])
        return "cannot be opened|damaged"
    if how == "newer":
        with h5py.File(path, "r+") as file:
            file.attrs["format_version"] = 99
        return "format version 99.*Update"
    with h5py.File(path, "r+") as file:
        del file["x"]
    return "damaged: x missing"


@pytest.mark.parametrize(
    "how", ["missing", "empty", "text", "zip", "foreign", "cut", "newer", "no states"]
)
def test_damaged_files_say_so(tmp_path, how):
    path = tmp_path / "r.nc"
    message = damage_file(path, how)
    with pytest.raises(ValueError, match=message):
        insitu.files.open(path)


def test_damaged_states_are_found_on_reading(tmp_path):
    """The checksum of every chunk: a flipped bit is an error and not a number."""
    path = tmp_path / "r.nc"
    x = np.random.default_rng(0).normal(size=(3, 3, 2))
    insitu.files.save(path, simple(), x)
    data = bytearray(path.read_bytes())
    data[data.find(x[1].tobytes())] ^= 1
    path.write_bytes(data)
    with insitu.files.open(path) as r:
        inspection = insitu.files.inspect(r)
    assert [f.what for f in inspection.findings if f.serious] == ["damaged"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"channels": ("a", "a")}, "a appears more than once"),
        ({"channels": ()}, "one name or more"),
        ({"dtype": "int16"}, "float32, float64, complex64 or complex128; got int16"),
        ({"t": [0.0, 0.0]}, "must increase strictly"),
        ({"parameters": {"a b": 1.0}}, "names in `parameters`"),
    ],
)
def test_descriptions_are_checked(change, message):
    with pytest.raises(ValueError, match=message):
        simple(**change)
