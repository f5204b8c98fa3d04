"""Faults on purpose: kills in plain mode, flipped bits, two writers, size limits, files that
point elsewhere.
"""

import os
import re
import shutil
import zipfile

import h5py
import numpy as np
import pytest

from fluctua import insitu
from fluctua.insitu.recording import ownership
from forks import start_python

T = np.arange(5.0)
X = np.random.default_rng(0).normal(size=(20, 5, 2))
PHASE = np.linspace(1.0, 2.0, 20)
HEAD = insitu.files.Description(
    T,
    ("a", "b"),
    context={"phase": ()},
    parameters={"omega": [0.25, 0.75]},
    settings={"heater": 1.23456},
)


@pytest.fixture
def path(tmp_path):
    insitu.files.save(tmp_path / "r.nc", HEAD, X, {"phase": PHASE})
    return tmp_path / "r.nc"


# -------------------------------------------------------------------------------------------- kills

DIES = """
import os, sys
import h5py
from fluctua.insitu.recording import writer
from fluctua.insitu.files import Description

class Dies(h5py.File):
    def __init__(self, name, mode="r", **options):
        super().__init__(name, mode, **options)
        if mode == "r+":
            os._exit(9)

h5py.File = Dies
path, where = sys.argv[1:]
if where == "create":
    writer.create(path, Description([0.0, 1.0], ("a",)))
elif where == "append_to":
    writer.append_to(path)
else:
    writer.repair(path)
os._exit(1)
"""


def add_unfinished(path):
    """One more row of states than numbers, as a kill in the middle of an append leaves it."""
    with h5py.File(path, "r+", libver=("v110", "v110")) as file:
        file["x"].resize(21, axis=0)


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    """Files whose writer died in plain mode, by where it died, each with the lock that it left."""
    folder = tmp_path_factory.mktemp("killed")
    for where in ("append_to", "repair"):
        insitu.files.save(folder / where, HEAD, X, {"phase": PHASE})
    add_unfinished(folder / "repair")
    children = [
        start_python(DIES, folder / where, where) for where in ("create", "append_to", "repair")
    ]
    for child in children:
        child.communicate()
        assert child.returncode == 9
    return folder


@pytest.mark.parametrize("where", ["create", "append_to", "repair"])
@pytest.mark.parametrize("door", ["open", "append_to", "repair", "put_table", "replace"])
def test_a_kill_in_plain_mode_locks_nothing(killed, tmp_path, where, door):
    path, count = tmp_path / where, 0 if where == "create" else 20
    for name in (where, f".{where}.writer"):
        shutil.copy(killed / name, tmp_path / name)
    assert ownership.read_mark(path) == 1  # HDF5 opens such a file in no mode
    with insitu.files.open(path) as r:
        assert (r.count, r.interrupted) == (count, True)
        assert insitu.files.inspect(r).summary["trajectories"] == count
    if door == "append_to":
        with insitu.files.append_to(path) as writer:
            assert writer.count == count
    elif door == "repair":
        assert insitu.files.repair(path)
    elif door == "put_table":
        insitu.files.put_table(path, "noise", {"diffusion": 1.0})
    elif door == "replace":
        insitu.files.create(path, HEAD, replace=True).close()
        count = 0
    if door != "open":
        with h5py.File(path) as file:  # an ordinary file again
            assert file["x"].shape[0] == count
            if count:
                np.testing.assert_array_equal(file["x"][:], X)
        assert list(tmp_path.iterdir()) == [path]


def test_states_that_were_flushed_without_their_number_are_counted(path):
    """A kill between the two flushes of an append: states, context and checksum are whole, the
    number is not there.
    """
    with h5py.File(path, "r+", libver=("v110", "v110")) as file:
        file["trajectory"].resize(19, axis=0)
    with insitu.files.append_to(path) as writer:
        assert writer.append(X[0], {"phase": 3.0}) == 20
    with insitu.files.open(path) as r:
        np.testing.assert_array_equal(r.x[:20], X)
        assert r.count == 21


# -------------------------------------------------------------------------------------- two writers

HOLDS = """
import sys
from fluctua.insitu.recording.writer import append_to
writer = append_to(sys.argv[1])
print("ready", flush=True)
sys.stdin.read()
writer.close()
"""


@pytest.mark.long
def test_a_living_writer_keeps_its_file(path):
    child = start_python(HOLDS, path)
    assert child.stdout.readline() == "ready\n", child.stderr.read()
    before = path.stat().st_ino
    for take in (
        lambda: insitu.files.create(path, HEAD, replace=True),
        lambda: insitu.files.append_to(path),
        lambda: insitu.files.repair(path),
        lambda: insitu.files.put_table(path, "noise", {"diffusion": 1.0}),
    ):
        with pytest.raises(ValueError, match=f"being written by process {child.pid} on"):
            take()
    assert path.stat().st_ino == before
    child.communicate("")
    insitu.files.append_to(path).close()


@pytest.mark.long
@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
def test_of_two_that_append_one_is_told(path):
    """Four at once: each either appends or hears who does, and nobody sees the lock of HDF5."""
    code = """
    import os, sys
    from fluctua.insitu.recording.writer import append_to
    all(os.fork() for _ in range(3))  # after the import, which takes longer than all the rest
    os.read(0, 1)
    try:
        with append_to(sys.argv[1]) as writer:
            writer.append([[1.0, 2.0]] * 5, {"phase": 0.0})
        answer = "appended"
    except ValueError as error:
        answer = str(error)
    os.write(1, (answer + chr(0)).encode())
    """
    child = start_python(code, path)
    out, errors = child.communicate("gggg")
    answers = out.split("\0")[:-1]
    assert child.returncode == 0, errors
    assert len(answers) == 4, errors
    done = answers.count("appended")
    assert done >= 1
    assert all(a == "appended" or re.search("written by|open in another", a) for a in answers), (
        answers
    )
    with insitu.files.open(path) as r:
        assert r.count == 20 + done


@pytest.mark.long
def test_a_file_open_elsewhere_is_named(path):
    with h5py.File(path):
        child = start_python(HOLDS, path)
        assert "open in another program" in child.communicate("")[1]


def test_a_file_that_is_open_for_reading_does_not_grow(path):
    with insitu.files.open(path), pytest.raises(ValueError, match="open in this program"):
        insitu.files.append_to(path)


# ------------------------------------------------------------------------------------- flipped bits


def flip_bit(path, what, at=0, bit=0):
    data = bytearray(path.read_bytes())
    start = data.find(what)
    assert start > 0
    assert data.count(what) == 1
    data[start + at] ^= 1 << bit
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("entry", "bit"), [(3, 0), (3, 7), (1, 0), (16, 4), (19, 0), (19, 4), (0, 2)]
)
def test_a_flipped_bit_in_the_numbers_deletes_nothing(path, entry, bit):
    flip_bit(path, np.arange(20).tobytes(), 8 * entry, bit)
    before = path.read_bytes()
    for change in (insitu.files.append_to, insitu.files.repair):
        with pytest.raises(
            ValueError,
            match=rf"entry {entry} of /trajectory is {entry ^ (1 << bit)} and not {entry}",
        ):
            change(path)
        assert path.read_bytes() == before
    with insitu.files.open(path, damaged=True) as r:
        np.testing.assert_array_equal(r.x[:], X)
        assert [f.what for f in insitu.files.inspect(r).findings if f.serious] == ["damaged"]
        copy = path.with_name("copy.nc")
        assert insitu.files.convert(r, copy) == (20, (), ())
    with insitu.files.open(copy) as r:
        np.testing.assert_array_equal(r.x[:], X)
        np.testing.assert_array_equal(r.context["phase"], PHASE)


def test_a_last_number_that_became_zero_is_found_by_its_checksum(path):
    """16 with one bit flipped is 0, as a number that was never written may be; the checksum
    tells that it was.
    """
    with h5py.File(path, "r+", libver=("v110", "v110")) as file:
        for name in ("x", "trajectory", "checksum", "context/phase"):
            file[name].resize(17, axis=0)
        file["trajectory"][16] = 0
    with insitu.files.append_to(path) as writer:
        assert writer.count == 17


@pytest.mark.parametrize(
    ("what", "message"),
    [
        (PHASE.tobytes(), "context of trajectory 4"),
        (np.array([0.25, 0.75]).tobytes(), "/parameters is not what was written"),
        (np.float64(1.23456).tobytes(), "/settings is not what was written"),
        (T.tobytes(), "/time is not what was written"),
    ],
)
def test_flipped_bits_elsewhere_are_named(path, what, message):
    flip_bit(path, what, 8 * 4 if what == PHASE.tobytes() else 1, 3)
    with pytest.raises(ValueError, match=message), insitu.files.open(path) as r:
        assert r.context
    with insitu.files.open(path, damaged=True) as r:
        (finding,) = [f for f in insitu.files.inspect(r).findings if f.serious]
    assert finding.what == "damaged"
    assert re.search(message, finding.text)


def test_files_without_checksums_still_open(path):
    with h5py.File(path, "r+", libver=("v110", "v110")) as file:
        file.attrs["format_version"] = 1  # later files always have them
        del file["checksum"]
        for name in ("time", "channel", "parameters", "settings"):
            del file[name].attrs["checksum"]
    with insitu.files.append_to(path) as writer:
        writer.append(X[3], {"phase": 1.0})
    with insitu.files.open(path) as r:
        assert r.count == 21
        assert [(f.what, f.serious) for f in insitu.files.inspect(r).findings] == [
            ("no checksums", False)
        ]


# -------------------------------------------------------------------------------------- size limits

LIMITED = """
import resource, sys
import numpy as np
import fluctua.insitu.recording.writer as w
from fluctua.insitu.recording.description import Description

if sys.argv[2] == "unforeseen":
    w.disk.check_limit = lambda *_: None
for limit in range(60_000, 700_000, 79_000):
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    done = 0
    try:
        head = Description(np.arange(300.0), ("a", "b"), "float64", context={"n": ()})
        with w.create(f"{sys.argv[1]}/{limit}.nc", head) as writer:
            while True:
                done = writer.append(np.full((300, 2), float(writer.count)), {"n": 1.0}) + 1
    except ValueError as error:
        print(limit, done, error, flush=True)
"""


@pytest.mark.long
@pytest.mark.parametrize("how", ["foreseen", "unforeseen"])
def test_what_is_limited_says_so_and_loses_nothing(tmp_path, how):
    """`ulimit -f`, seen before a write; and as on file systems where only the write itself
    fails.
    """
    child = start_python(LIMITED, tmp_path, how)
    out, errors = child.communicate()
    assert child.returncode == 0, errors
    answers = [line.split(" ", 2) for line in out.splitlines()]
    assert len(answers) == 9
    for limit, done, message in answers:
        assert "ulimit -f" in message
        path = tmp_path / f"{limit}.nc"
        if not path.exists():
            assert int(done) == 0
            continue
        with insitu.files.open(path) as r:
            assert r.count == int(done)
            np.testing.assert_array_equal(r.x[:, 0, 0], np.arange(r.count))
        with insitu.files.append_to(path) as writer:  # without the limit it goes on
            writer.append(np.zeros((300, 2)), {"n": 1.0})
        with h5py.File(path) as file:
            assert file["x"].shape[0] == int(done) + 1
    assert int(answers[-1][1]) > 40


# ---------------------------------------------------------------------------- what points elsewhere


def _external(file, name, elsewhere):
    file.create_dataset(name, (4,), "f8", external=[(str(elsewhere), 0, 32)])


def _link(file, name, elsewhere):
    file[name] = h5py.ExternalLink(str(elsewhere), "/secret")


def _soft(file, name, elsewhere):
    file[name] = h5py.SoftLink("/time")


def _virtual(file, name, elsewhere):
    layout = h5py.VirtualLayout((4,), "f8")
    layout[:] = h5py.VirtualSource(str(elsewhere), "secret", (4,))
    file.create_virtual_dataset(name, layout)


@pytest.mark.parametrize("point", [_external, _link, _soft, _virtual])
@pytest.mark.parametrize("kind", ["recording", "foreign"])
def test_data_of_another_file_are_refused(tmp_path, path, point, kind):
    with h5py.File(tmp_path / "other.h5", "w") as file:
        file["secret"] = np.arange(4.0)
    if kind == "foreign":
        path = tmp_path / "f.h5"
        with h5py.File(path, "w") as file:
            file["x"], file["t"], file["parameters/k"] = X, T, 1.0
    with h5py.File(path, "r+") as file:
        point(file, "parameters/secret", tmp_path / "other.h5")
    with pytest.raises(ValueError, match=r"/parameters/secret (is a link to|lies in another file)"):
        insitu.files.open(path)


@pytest.mark.parametrize("name", ["x", "t", "parameters/k", "context/phase"])
def test_shapes_of_terabytes_are_refused(tmp_path, name):
    path = tmp_path / "f.h5"
    with h5py.File(path, "w") as file:
        for known, value in (("x", X), ("t", T), ("parameters/k", 1.0), ("context/phase", PHASE)):
            if known != name:
                file[known] = value
        shape = {
            "x": (20, 5, 2 * 10**11),
            "t": (10**12,),
            "parameters/k": (10**12,),
            "context/phase": (20, 10**11),
        }
        file.create_dataset(name, shape[name], "f8", chunks=True)
    with pytest.raises(ValueError, match=rf"/{name} declares .* and holds 0"):
        insitu.files.open(path)


@pytest.mark.parametrize("ending", ["npz", "npy"])
def test_shapes_of_terabytes_in_numpy_files_are_refused(tmp_path, ending):
    path = tmp_path / f"a.{ending}"
    np.save(tmp_path / "x.npy", np.zeros((2, 5, 2)))
    data = (
        (tmp_path / "x.npy")
        .read_bytes()
        .replace(b"(2, 5, 2), }           ", b"(20000000000, 500, 2), }")
    )
    assert b"20000000000" in data
    if ending == "npy":
        path.write_bytes(data)
    else:
        with zipfile.ZipFile(path, "w") as file:
            file.writestr("x.npy", data)
    with pytest.raises(ValueError, match=r"20000000000|larger than|mmap|greater"):
        insitu.files.open(path, dt=1.0)


WRITES_AND_DIES = """
import os, sys, numpy as np
from fluctua import insitu
head = insitu.files.Description(np.linspace(0, 1, 51), ("x",), "float64")
writer = insitu.files.create(sys.argv[1], head)
for _ in range(20):
    writer.append(np.ones((51, 1)))
os._exit(9)
"""

OPENS = """
import sys
from fluctua import insitu
try:
    insitu.files.open(sys.argv[1])
except ValueError as error:
    print(error)
"""


@pytest.mark.long
def test_a_torn_page_of_a_dead_writer_is_named_at_once(tmp_path):
    """In single-writer mode HDF5 would read the page again for minutes, as if its writer were
    about to mend it.
    """
    path = tmp_path / "run.nc"
    assert start_python(WRITES_AND_DIES, path).wait() == 9
    assert ownership.read_mark(path) & ownership.SINGLE_WRITER
    contents = bytearray(path.read_bytes())
    contents[contents.rindex(b"EAHD") + 12] ^= 0xFF
    path.write_bytes(contents)
    child = start_python(OPENS, path)
    try:
        message, _ = child.communicate(timeout=60)
    finally:
        child.kill()
    assert "checksum" in str(message)
