"""What the page reads of run folders: states, thinned histories, and nothing outside."""

import os

import h5py
import numpy as np
import pytest

from fluctua.store import course, history
from fluctua.store.history import Row
from fluctua.watch import folders
from fluctua.watch.folders import RunLibrary, UnreadableRun, thin
from watched import Growing


def only(library):
    (line,) = library.overview()
    return line


@pytest.mark.skipif(
    not os.path.exists("/proc/locks"), reason="who holds a lock is read from /proc/locks, Linux's"
)
def test_states(tmp_path):
    run, library = Growing(tmp_path / "a"), RunLibrary([tmp_path])
    run.begin()
    run.grow(3)
    assert (only(library)["state"], only(library)["iteration"]) == ("running", 2)
    run.kill()
    assert only(library)["state"] == "killed"
    run.begin()
    run.grow(2)
    run.end()
    assert only(library)["state"] == "ended"


def test_looking_leaves_everything_as_it_is(tmp_path):
    run, library = Growing(tmp_path / "a"), RunLibrary([tmp_path])
    run.grow(12)
    run.incident("dropped", "line went")
    seen = lambda: {p: (p.stat().st_mtime_ns, p.stat().st_size) for p in tmp_path.rglob("*")}
    before = seen()
    number = only(library)["number"]
    for read in (library.history, library.parameters, library.details):
        read(number)
    library.theta(number, 0)
    assert seen() == before


def test_a_history_that_is_cut_back_is_read_again(tmp_path):
    run, library = Growing(tmp_path / "a"), RunLibrary([tmp_path])
    run.grow(30)
    number = only(library)["number"]
    assert library.history(number)["columns"]["iteration"][-1] == 29
    run.cut(20)
    assert library.history(number)["columns"]["iteration"][-1] == 19
    run.grow(5, "escalate 2000")
    answer = library.history(number)
    assert answer["columns"]["iteration"] == list(range(25))
    assert answer["events"] == [{"iteration": 24, "event": "escalate 2000"}]


def test_signal_of_each_family(tmp_path):
    run, library = Growing(tmp_path / "a"), RunLibrary([tmp_path])
    run.grow(4)
    columns = library.history(only(library)["number"])["columns"]
    sites = run.network.sites
    np.testing.assert_allclose(
        columns["omega norm"], [0.01 * (k + 1) * sites**0.5 for k in range(4)], rtol=1e-4
    )
    np.testing.assert_allclose(columns["omega error"], [0.01 * sites**0.5] * 4, rtol=1e-4)


def test_thinning_keeps_ends_and_peaks():
    values = np.zeros(100_000)
    values[77_777] = 1.0
    places = thin(values, 2000)
    assert len(places) <= 2000
    assert {0, 77_777, 99_999} <= set(places.tolist())


def test_long_histories_leave_thin_and_few_are_held(tmp_path, monkeypatch):
    monkeypatch.setattr(folders, "HELD", 2)
    library = RunLibrary([tmp_path])
    for name in "abc":
        run = Growing(tmp_path / name)
        with open(run.place.history, "a") as file:
            file.writelines(
                history.format_row(Row(k, k, 0.1, 0.01, 10, 10 * k, 1.0, 0.1), "aa")
                for k in range(20_000)
            )
    for line in library.overview():
        answer = library.history(line["number"])
        assert len(answer["columns"]["J"]) <= folders.POINTS
        assert answer["rows"] == 20_000
        inside = library.history(line["number"], 100, 199)["columns"]["iteration"]
        assert inside == list(range(100, 200))  # a stretch is shown whole
    assert len(library._held) == 2


def test_nothing_outside_is_read(tmp_path):
    outside, inside = Growing(tmp_path / "out" / "secret"), tmp_path / "in"
    outside.grow(3)
    run = Growing(inside / "a")
    run.grow(3)
    (inside / "linked").symlink_to(outside.place.path)
    (run.place.path / "summary.txt").symlink_to(outside.place.settings)
    run.place.parameters.unlink()
    run.place.parameters.symlink_to(outside.place.parameters)
    library = RunLibrary([inside])
    assert [line["name"] for line in library.overview()] == ["a"]
    number = only(library)["number"]
    assert "summary.txt" not in library.details(number)["texts"]
    with pytest.raises(UnreadableRun, match="parameters.h5"):
        library.parameters(number)


def test_links_within_hdf5_are_not_followed(tmp_path):
    run, library = Growing(tmp_path / "a"), RunLibrary([tmp_path])
    run.grow(6)
    with h5py.File(tmp_path / "other.h5", "w") as file:
        file["data"] = np.zeros(3)
    with h5py.File(run.place.parameters, "a") as file:
        file["foreign"] = h5py.ExternalLink(str(tmp_path / "other.h5"), "data")
    with pytest.raises(UnreadableRun, match="foreign"):
        library.parameters(only(library)["number"])


@pytest.mark.parametrize("damage", [b"", b"no table\n", b"row,iteration\n1,2\n", bytes(range(256))])
def test_damaged_files_are_named(tmp_path, damage):
    run, library = Growing(tmp_path / "a"), RunLibrary([tmp_path])
    run.grow(3)
    number = only(library)["number"]
    run.place.history.write_bytes(damage)
    run.place.parameters.write_bytes(damage)
    library.overview()
    with pytest.raises(UnreadableRun, match="history.csv"):
        library.history(number)
    with pytest.raises(UnreadableRun, match="parameters.h5"):
        library.parameters(number)


def test_own_processes_have_courses(tmp_path):
    run, library = Growing(tmp_path / "a"), RunLibrary([tmp_path])
    run.grow(3)
    theta = {"k": np.array(1.0), "w": np.zeros((2, 2))}
    course.create(run.place.parameters, theta, "aa")
    course.append(
        run.place.parameters,
        [course.Point(0, 0, theta), course.Point(1, 1, {**theta, "k": np.array(2.0)})],
    )
    answer = library.parameters(only(library)["number"])
    assert answer["network"] is None
    assert answer["courses"]["k"] == [1.0, 2.0]
    assert {"w[0, 0]", "w[1, 1]"} < set(answer["courses"])


def test_arrays_of_many_numbers_are_profiles_with_bounds_and_times(tmp_path):
    run, library = Growing(tmp_path / "a"), RunLibrary([tmp_path])
    theta = {
        "theta/protocol": lambda k: np.full(50, 0.1 * k),
        "theta/weights": lambda k: np.zeros((3, 9)),
        "theta/few": lambda k: np.zeros(8),
    }
    low = {name: np.full_like(value(0), -1.0) for name, value in theta.items()}
    high = {name: np.full_like(value(0), np.inf) for name, value in theta.items()}
    high["theta/protocol"] = np.linspace(1, 2, 50)
    run.use(theta, low, high, np.linspace(0, 5, 51))
    run.grow(6)
    answer = library.parameters(only(library)["number"])
    assert set(answer["profiles"]) == {"theta/protocol", "theta/weights"}
    protocol = answer["profiles"]["theta/protocol"]
    assert protocol["low"] == [-1.0]
    np.testing.assert_allclose(protocol["high"], np.linspace(1, 2, 50))
    np.testing.assert_allclose(protocol["times"], np.linspace(0, 4.9, 50), atol=1e-12)
    assert answer["profiles"]["theta/weights"] == {"low": [-1.0], "high": None, "times": None}
    assert set(answer["courses"]) == {"iterations", *(f"theta/few[{k}]" for k in range(8))}


@pytest.mark.parametrize("attribute", ["text", np.array([b"a"]), h5py.Empty("f8")])
def test_bounds_that_are_no_numbers_are_left_out(tmp_path, attribute):
    run, library = Growing(tmp_path / "a"), RunLibrary([tmp_path])
    run.use({"theta/protocol": lambda k: np.zeros(20)})
    run.grow(6)
    with h5py.File(run.place.parameters, "a") as file:
        file["theta/protocol"].attrs["low"] = attribute
    answer = library.parameters(only(library)["number"])
    assert answer["profiles"]["theta/protocol"]["low"] is None


def test_what_a_model_expected_stands_beside_the_history(tmp_path):
    run, library = Growing(tmp_path / "a"), RunLibrary([tmp_path])
    run.grow(6)
    number = only(library)["number"]
    assert "expected" not in library.history(number)["columns"]
    assert library.record(number) == {"iteration": None, "times": [], "components": []}
    before = only(library)["version"]
    run.expect()
    assert only(library)["version"] != before
    columns = library.history(number)["columns"]
    # five digits are written
    np.testing.assert_allclose(
        columns["expected"][::2], np.array(columns["J"][::2]) + 0.01, rtol=1e-4
    )
    assert columns["expected"][1::2] == [None] * 3
    assert columns["record_chi2"][::2] == [1.1] * 3
    record = library.record(number)
    assert record["iteration"] == 4
    assert len(record["times"]) == 50
    assert [component["name"] for component in record["components"]] == ["Re psi[0]", "Im psi[0]"]
    assert record["components"][1]["measured"][0] == pytest.approx(1.01)
    run.place.records.write_text("# iteration = 4\ntime,a measured\n0,\n1,x,2\n")
    with pytest.raises(UnreadableRun, match=r"records\.csv"):
        library.record(number)
    run.place.predictions.write_text("no table\n")
    assert "expected" not in library.history(number)["columns"]  # the rest is shown


def test_a_folder_that_is_not_there():
    with pytest.raises(ValueError, match="no folder nowhere"):
        RunLibrary([__import__("pathlib").Path("nowhere")])


@pytest.mark.long
def test_instruments_are_read_from_their_table(tmp_path):
    run, library = Growing(tmp_path / "a"), RunLibrary([tmp_path])
    run.grow(12)
    number = only(library)["number"]
    assert library.devices(number) == {"iterations": [], "devices": []}
    before = only(library)["version"]
    run.measure(silent=(2,))
    assert only(library)["version"] != before
    answer = library.devices(number)
    assert answer["iterations"] == list(range(12))
    assert [device["name"] for device in answer["devices"]] == ["1", "2", "3"]
    assert answer["devices"][0]["columns"]["J"][:2] == [0.0, 0.01]
    assert answer["devices"][1]["columns"]["J"] == [None] * 12
    assert answer["devices"][1]["columns"]["up"][-1] == 0
    assert answer["devices"][2]["columns"]["drift omega_offset"][-1] == 0.011
    run.cut(5)  # what follows the checkpoint is not shown, whether its table was cut yet or not
    assert library.devices(number)["iterations"] == list(range(5))
    run.grow(folders.POINTS)
    run.measure(devices=folders.DEVICES + 3)
    long = library.devices(number)
    assert len(long["iterations"]) == folders.POINTS // 4
    assert long["iterations"][-1] == run.count - 1
    assert len(long["devices"]) == folders.DEVICES
    (run.place.path / "devices.csv").write_text("row,1 J\n0,zero\n")
    with pytest.raises(UnreadableRun, match="devices.csv"):
        library.devices(number)
