"""Events of jump processes in recordings: what is read is what was written, to the bit, and
damage is named.
"""

import json

import h5py
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import xarray as xr
from typer.testing import CliRunner

import fluctua as fl
from fluctua import insitu
from fluctua.cli.app import app
from fluctua.processes.jumps import Events, Jumps, RandomJump

T = np.linspace(0.0, 2.0, 11)
MODEL = """
import jax.numpy as jnp
import fluctua as fl

from fluctua.insitu.files import RecordingModel
process = fl.Jumps(lambda th, x: jnp.array([th["birth"], th["death"] * x[0]]), [[1.0], [-1.0]])
objective = fl.Objective(terminal=lambda th, x: x[0])
model = RecordingModel(process, objective)
"""
BIRTH_DEATH = Jumps(lambda th, x: jnp.array([th["birth"], th["death"] * x[0]]), [[1.0], [-1.0]])
RATES = {"birth": jnp.array(5.0), "death": jnp.array(1.0)}
COUNT = fl.Objective(terminal=lambda th, x: x[0])
KINDS = insitu.files.EventKinds(("birth", "death"), [[1.0], [-1.0]])


def head(**changed):
    options = {"parameters": {"birth": 5.0, "death": 1.0}, "events": KINDS, **changed}
    return insitu.files.Description(T, ("n",), **options)


def ensemble(count=60, key=7):
    return fl.simulator(BIRTH_DEATH, jnp.array([3.0]), jnp.asarray(T))(
        jax.random.key(key), RATES, count
    )


def of(events, j):
    return Events(*(np.asarray(leaf)[j] for leaf in events))


@pytest.fixture(scope="module")
def data():
    return ensemble()


@pytest.fixture
def path(tmp_path, data):
    insitu.files.save(tmp_path / "r.nc", head(), data.x, events=data.events)
    return tmp_path / "r.nc"


@pytest.mark.parametrize("baseline", ["time", "mean", "none"])
def test_the_gradient_of_the_file_is_that_of_memory_to_the_bit(path, data, baseline):
    memory = fl.gradient(BIRTH_DEATH, COUNT, RATES, data, baseline=baseline)
    with insitu.files.open(path) as recording:
        file = fl.gradient(BIRTH_DEATH, COUNT, RATES, recording.trajectories(), baseline=baseline)
        small = fl.gradient(
            BIRTH_DEATH, COUNT, RATES, recording.trajectories(), baseline=baseline, block_bytes=500
        )
    for name in RATES:
        assert file.gradient[name] == memory.gradient[name]
        np.testing.assert_allclose(small.gradient[name], memory.gradient[name], rtol=1e-9)


def test_what_is_read_is_what_was_written_however_it_was(tmp_path, path, data):
    """At once, one after the other, going on with a file, and as a copy of a copy."""
    with insitu.files.create(tmp_path / "one.nc", head()) as writer:
        for j in range(20):
            writer.append(data.x[j], None, of(data.events, j))
    with insitu.files.append_to(tmp_path / "one.nc") as writer:
        for j in range(20, 60):
            writer.append(data.x[j], None, of(data.events, j))
    with insitu.files.open(path) as recording:
        insitu.files.convert(recording, tmp_path / "copy.nc")
    for file in (path, tmp_path / "one.nc", tmp_path / "copy.nc"):
        with insitu.files.open(file) as recording:
            read = recording.trajectories()
            for mine, theirs in zip(read.events, data.events, strict=True):
                np.testing.assert_array_equal(mine[:], theirs)
                np.testing.assert_array_equal(mine[3:9, 2:5], theirs[3:9, 2:5])
            some = recording.trajectories(10, 12, load=True).events
            np.testing.assert_array_equal(some.after, data.events.after[10:12])


def test_a_killed_writer_loses_one_trajectory_at_most(tmp_path, data):
    """The events of a trajectory without a number are overwritten by those of the next."""
    path = tmp_path / "r.nc"
    with insitu.files.create(path, head()) as writer:
        for j in range(5):
            writer.append(data.x[j], None, of(data.events, j))
    with h5py.File(path, "r+") as file:  # as if the fifth had been killed before it was whole
        file["trajectory"].resize(4, axis=0)
        file["checksum"][4] = 0
    with insitu.files.open(path) as recording:
        assert (recording.count, recording.incomplete) == (4, 1)
    with insitu.files.append_to(path) as writer:
        for j in range(4, 8):
            writer.append(data.x[j], None, of(data.events, j))
    with insitu.files.open(path) as recording:
        channel = recording.trajectories(load=True).events.channel
        np.testing.assert_array_equal(
            channel, np.asarray(data.events.channel)[:8, :, : channel.shape[2]]
        )
        assert channel.shape[2] == np.max(np.sum(np.asarray(data.events.channel)[:8] >= 0, axis=2))


@pytest.mark.long
def test_random_sizes_between_which_the_state_moves(tmp_path, key):
    size = RandomJump(
        sample=lambda key, th, x, t, c, i: th["m"] + jax.random.normal(key, (1,)),
        log_density=lambda th, change, x, t, c, i: -jnp.sum((change - th["m"]) ** 2) / 2,
    )
    process = Jumps(
        lambda th, x: jnp.array([1.5]),
        size,
        fl.Process(lambda th, x: -x, lambda th, x: 0.5 * jnp.ones(1)),
    )
    theta = {"m": jnp.array(0.4)}
    data = fl.simulator(process, jnp.array([1.0]), jnp.asarray(T))(key, theta, 30)
    kinds = insitu.files.EventKinds(("kick",), still=False)
    insitu.files.save(
        tmp_path / "r.nc", head(events=kinds, parameters={"m": 0.4}), data.x, events=data.events
    )
    square = fl.Objective(terminal=lambda th, x: x[0] ** 2)
    with insitu.files.open(tmp_path / "r.nc") as recording:
        file = insitu.estimate(recording, process, square, theta).estimate
    assert file.gradient["m"] == fl.gradient(process, square, theta, data).gradient["m"]


def test_other_programs_read_it(path, data):
    with xr.open_dataset(path, engine="h5netcdf", group="events") as events:
        assert (
            int(events["count"].sum())
            == len(events["after"])
            == int((data.events.channel >= 0).sum())
        )


# ------------------------------------------------------------------------------------------- damage


def damage_number(path, name, place, value):
    """One number of a file changed, and its checksum with it: only sense can tell."""
    from fluctua.insitu.recording import event_rows

    with h5py.File(path, "r+") as file:
        group = file["events"]
        group[name][place] = value
        begin, count = 0, int(group["count"][0])
        rows = event_rows.Rows(
            *(group[n][begin:count] for n in ("step", "after", "channel")), np.zeros((count, 1))
        )
        group["checksum"][0] = event_rows.compute_crc(rows, has_change=False)


@pytest.mark.parametrize(
    ("name", "place", "value", "message"),
    [
        ("step", 0, 10, "event 0 is in step 10, and there are 10"),
        ("step", 0, -1, "event 0 is in step -1"),
        ("after", 1, 0.5, r"event 1 is 0.5 after .* outside its step of 0.2"),
        ("after", 1, np.nan, "event 1 is nan after"),
        ("step", 0, 9, "event 1 is before event 0"),
        ("channel", 2, 2, "event 2 is of kind 2, and there are 2"),
        ("channel", 0, None, r"n moves by .* in step \d, and its events there add up to"),
    ],
)
def test_events_that_cannot_be_are_named(path, name, place, value, message):
    with h5py.File(path, "r") as file:
        value = 1 - int(file["events/channel"][0]) if value is None else value
    damage_number(path, name, place, value)
    with (
        insitu.files.open(path) as recording,
        pytest.raises(ValueError, match=f"trajectory 0: .*{message}"),
    ):
        fl.gradient(BIRTH_DEATH, COUNT, RATES, recording.trajectories())


def test_a_flipped_bit_and_a_short_column_are_named(path, tmp_path):
    with h5py.File(path, "r+") as file:
        file["events/after"][3] *= 1 + 1e-9
    with (
        insitu.files.open(path) as recording,
        pytest.raises(ValueError, match="trajectory 0.*checksum"),
    ):
        recording.trajectories(0, 2)
    with insitu.files.open(path, damaged=True) as recording:
        assert insitu.files.convert(recording, tmp_path / "saved.nc").lost == (0,)
        assert any(
            "trajectory 0" in f.text for f in insitu.files.inspect(recording).findings if f.serious
        )
    with h5py.File(path, "r+") as file:
        file["events/channel"].resize(10, axis=0)
    with pytest.raises(
        ValueError, match="/events/channel has 10 entries, and 60 trajectories count"
    ):
        insitu.files.open(path)


def test_what_is_written_must_belong_together(tmp_path, data):
    with insitu.files.create(tmp_path / "r.nc", head()) as writer:
        with pytest.raises(ValueError, match="needs its events"):
            writer.append(data.x[0])
        after, channel, change = of(data.events, 0)
        with pytest.raises(
            ValueError, match=r"\(10, K\).*got \(10, \d+\), \(10, \d+\) and \(10, \d+, 2\)"
        ):
            writer.append(data.x[0], None, (after, channel, np.repeat(change, 2, axis=-1)))
        with pytest.raises(ValueError, match="n moves by"):
            writer.append(data.x[0], None, of(data.events, 1))
        assert writer.count == 0
    with (
        insitu.files.create(tmp_path / "plain.nc", head(events=None)) as writer,
        pytest.raises(ValueError, match="no events"),
    ):
        writer.append(data.x[0], None, of(data.events, 0))
    with pytest.raises(ValueError, match=r"events.changes.*\(2, 1\).*\(1, 2\)"):
        head(events=insitu.files.EventKinds(("birth", "death"), [[1.0, -1.0]]))


# ------------------------------------------------------------------------------------- the commands


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("jumps")
    (folder / "model.py").write_text(MODEL)
    data = ensemble(800)
    insitu.files.save(folder / "r.nc", head(), data.x, events=data.events)
    insitu.files.save(folder / "states.nc", head(events=None), data.x)
    (folder / "other.py").write_text(MODEL.replace("[[1.0], [-1.0]]", "[[-1.0], [1.0]]"))
    return folder


def command(name, *options):
    return CliRunner().invoke(app, [name, *map(str, options)])


@pytest.mark.long
def test_inspect_counts_the_events(folder):
    done = command("inspect", folder / "r.nc")
    assert done.exit_code == 0, (
        done.output
    )  # states that repeat, and zero as an extreme, are no damage here
    assert "events: birth" in done.output
    answer = json.loads(command("inspect", folder / "r.nc", "--json").output)["events"]["kinds"]
    assert abs(answer["birth"] - 800 * 5 * 2) < 4 * np.sqrt(8000)  # Poisson


@pytest.mark.long
def test_estimate_agrees_with_the_exact_answer(folder):
    """E[n_T] = 3e^{−dT} + b/d (1 − e^{−dT})."""
    answer = json.loads(
        command("estimate", folder / "r.nc", "--model", f"{folder}/model.py:model", "--json").output
    )
    fall = np.exp(-2.0)
    exact = {"birth": 1 - fall, "death": -3 * 2 * fall - 5 * (1 - fall) + 5 * 2 * fall}
    for name, value in exact.items():
        assert abs(answer["gradient"][name] - value) < 4 * answer["stderr"][name]
    assert answer["residuals"]["cause"] == ""
    np.testing.assert_allclose(
        answer["residuals"]["v"], 1, atol=0.05
    )  # thousands of events of each kind


@pytest.mark.parametrize(
    ("name", "file", "model", "message"),
    [
        ("estimate", "states.nc", "model.py", "has no events, and the score of `Jumps`"),
        ("estimate", "r.nc", "other.py", "(birth, death) change the state by [[1.0], [-1.0]]"),
        ("calibrate", "r.nc", "model.py", "Itô process; Jumps has neither"),
        ("advise", "r.nc", "model.py", "Itô process; Jumps has neither"),
    ],
)
def test_what_the_commands_cannot_do_is_said(folder, name, file, model, message):
    done = command(name, folder / file, "--model", f"{folder / model}:model")
    assert done.exit_code != 0
    assert message in " ".join(done.output.split())
