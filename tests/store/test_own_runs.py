"""Any process trained into a folder: the run left alone and the run that was killed are one run."""

import json
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import h5py
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fluctua as fl
import trap
from fluctua.core.simulate import planned_calls
from fluctua.store import checkpoint, history
from fluctua.store import folder as runfolder
from processes import environment_to_die_in

SCRIPT = Path(trap.__file__)


def same(one, other):
    rows = [
        [row._replace(seconds=0.0) for row in history.read(path / "history.csv")]
        for path in (one, other)
    ]
    assert rows[0] == rows[1]
    with h5py.File(one / "parameters.h5") as a, h5py.File(other / "parameters.h5") as b:
        np.testing.assert_array_equal(a["iteration"][:], b["iteration"][:])
        np.testing.assert_array_equal(a["theta/f"][:], b["theta/f"][:])
    with np.load(one / "final.npz") as a, np.load(other / "final.npz") as b:
        np.testing.assert_array_equal(a["f"], b["f"])


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "whole"
    return folder, trap.run(folder)


@pytest.fixture
def copy(whole, tmp_path):
    return Path(shutil.copytree(whole[0], tmp_path / "copy"))


def test_it_is_the_training_that_train_gives(whole):
    folder, result = whole
    records = list(fl.train(trap.describe(), iterations=40))
    np.testing.assert_array_equal(result.theta["f"], records[-1].next_theta["f"])
    rows = history.read(folder / "history.csv")
    assert [row.J for row in rows] == [float(r.estimate.value) for r in records]
    assert rows[-1].trajectories == records[-1].trajectories
    with h5py.File(folder / "parameters.h5") as file:
        np.testing.assert_array_equal(file["theta/f"][:], [r.theta["f"] for r in records])


def test_the_summary_measures_afresh_and_with_half_the_step(whole):
    folder, result = whole
    summary = json.loads((folder / "summary.json").read_text())
    assert summary == result.summary
    assert summary["finer"]["dt"] == pytest.approx(summary["final"]["dt"] / 2)
    f = float(result.theta["f"][0])
    for part, steps in (("final", 20), ("finer", 40)):
        dt = 2 / steps
        mean = f * (1 - (1 - dt) ** steps)  # of the Euler scheme, and below its variance
        variance = 0.09 * dt * (1 - (1 - dt) ** (2 * steps)) / (1 - (1 - dt) ** 2)
        z = (summary[part]["J"] + (mean - 1) ** 2 + variance) / summary[part]["J_stderr"]
        assert abs(z) < 4
    assert "J after" in repr(result)
    assert str(folder) in repr(result)


def command(folder):
    environment = environment_to_die_in(
        folder.parent, JAX_ENABLE_X64="1"
    )  # the precision of this process
    return subprocess.Popen(
        [sys.executable, SCRIPT, folder], stdout=subprocess.DEVNULL, env=environment
    )


@pytest.mark.long
def test_killed_at_random_moments_it_goes_on_to_the_bit(whole, tmp_path):
    """SIGKILL for real, several times, wherever the process is; then to the end, here."""
    folder, draw, kills = tmp_path / "killed", random.Random(1), 0
    for target in (0, 8, 20, 33):
        process = command(folder)
        while process.poll() is None:
            try:
                if (folder / "history.csv").read_text().count("\n") > target:
                    break
            except OSError:
                pass
            time.sleep(0.002)
        time.sleep(draw.uniform(0, 0.03))
        process.kill()
        kills += process.wait() == -signal.SIGKILL
    assert kills >= 3
    trap.run(folder)
    same(whole[0], folder)


def test_stopped_by_its_caller_and_extended(whole, tmp_path):
    def stop(row, record):
        if row.iteration == 11:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt) as stopped:
        trap.run(tmp_path / "run", iterations=25, on_row=stop)
    call = f'fluctua.run(…, folder="{tmp_path / "run"}") with the same training'
    assert stopped.value.__notes__ == [f"The run is saved. It continues with {call}."]
    assert len(history.read(tmp_path / "run" / "history.csv")) == 12
    trap.run(tmp_path / "run", iterations=25)
    trap.run(tmp_path / "run")
    same(whole[0], tmp_path / "run")


def test_a_process_that_was_never_called_is_trained(tmp_path):
    """Its fingerprint is made within a trace, where no check may ask for numbers of JAX."""
    process = fl.Process(lambda th, x: -th["f"] * x, lambda th, x: 0.4 * jnp.ones(1))
    simulator = fl.simulator(process, jnp.ones(1), jnp.linspace(0.0, 1.0, 11))
    estimator = fl.ppgt(simulator, fl.Objective(terminal=lambda th, x: x[0]))
    training = fl.Training(estimator, {"f": jnp.array(1.0)}, optax.adam(0.1), trajectories=4)
    assert trap.run(tmp_path / "run", 1, training).summary["iterations"] == 1


def test_a_complete_run_is_returned_as_it_is(whole):
    folder, result = whole
    again = trap.run(folder, on_row=lambda row, record: pytest.fail("a row"))
    np.testing.assert_array_equal(again.theta["f"], result.theta["f"])
    assert again.summary == result.summary


def test_an_estimator_that_remembers_goes_on_with_its_memory(tmp_path):
    def twin():
        splits = fl.ppgt(trap.SIMULATOR, trap.OBJECTIVE, process=trap.PROCESS, baseline=fl.Twin())
        return trap.describe(estimator=fl.ShrunkCorrection(splits, forget_after=5), trajectories=8)

    def stop(row, record):
        if row.iteration == 2:
            raise KeyboardInterrupt

    trap.run(tmp_path / "whole", 6, twin())
    with pytest.raises(KeyboardInterrupt):
        trap.run(tmp_path / "cut", 6, twin(), on_row=stop)
    trap.run(tmp_path / "cut", 6, twin())
    same(tmp_path / "whole", tmp_path / "cut")


def test_any_tree_of_parameters_has_names(tmp_path):
    def estimator(key, theta, count):
        zero = jax.tree.map(jnp.zeros_like, theta)
        one = jax.tree.map(jnp.ones_like, theta)
        return fl.Estimate(one, zero, one, jnp.asarray(1.0), jnp.asarray(0.1), count)

    theta = {"row": jnp.zeros(2), "net": [jnp.zeros(()), {"w": jnp.zeros((2, 3))}]}
    result = fl.run(
        fl.Training(estimator, theta, optax.sgd(0.1), trajectories=2),
        iterations=3,
        folder=tmp_path / "run",
    )
    assert result.summary["final"]["J"] == 1.0
    assert "2 trajectories of the estimator" in (tmp_path / "run" / "summary.txt").read_text()
    with np.load(tmp_path / "run" / "final.npz") as final:
        assert sorted(final.files) == ["net.0", "net.1.w", "row"]
        np.testing.assert_allclose(final["net.1.w"], 0.3, rtol=1e-6)


# ---------------------------------------------------------------------------------- what is refused


def test_what_may_not_change(whole):
    folder, _ = whole
    for changes, name in (
        ({"seed": 4}, "`seed` was 3 and is 4"),
        ({"trajectories": 21}, "`trajectories` was 20 and is 21"),
        ({"theta": {"f": jnp.ones(1)}}, "`theta`, the start"),
        ({"theta": {"f": jnp.ones(2)}}, "`parameters` was"),
    ):
        with pytest.raises(ValueError, match=name):
            trap.run(folder, training=trap.describe(**changes))


def other_training(**changes):
    """The trap of `trap.py` with another drift, noise, reward or time grid."""
    drift = changes.get("drift", lambda th, x: th["f"] - x)
    process = fl.Process(drift, lambda th, x: changes.get("noise", 0.3) * jnp.ones_like(x))
    objective = fl.Objective(terminal=lambda th, x: -((x[0] - changes.get("target", 1)) ** 2))
    substrate = fl.simulator(process, jnp.zeros(1), jnp.linspace(0, changes.get("horizon", 2), 21))
    estimator = fl.ppgt(substrate, objective, baseline=changes.get("baseline"))
    rule = optax.adam(changes.get("rate", 0.1))
    return trap.describe(estimator=estimator, optimiser=rule, bounds=changes.get("bounds"))


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"drift": lambda th, x: th["f"] - 1.01 * x}, "`process.drift`"),
        ({"noise": 0.31}, "`process.noise`"),
        ({"target": 1.1}, "`objective.terminal`"),
        ({"horizon": 2.1}, "`times`"),
        ({"baseline": "mean"}, "`baseline.name` was 'time' and is 'mean'"),
        ({"rate": 0.11}, "`optimiser`"),
        ({"bounds": (-1.0, 1.0)}, "`bounds`"),
    ],
)
def test_other_code_is_refused_by_name(whole, changes, name):
    with pytest.raises(ValueError, match=name):
        trap.run(whole[0], training=other_training(**changes))


def test_the_same_training_in_other_words_goes_on(copy):
    trap.run(copy, 41, other_training(), report=pytest.fail)


def test_an_ensemble_size_that_is_a_function_is_compared_by_its_values(tmp_path):
    def go(trajectories, iterations):
        return trap.run(tmp_path / "run", iterations, trap.describe(trajectories=trajectories))

    go(lambda iteration: 2 + iteration, 3)
    go(lambda step: step + 2, 4)
    with pytest.raises(ValueError, match="`trajectories`"):
        go(lambda iteration: 3 + iteration, 4)


def edit_settings(folder, change):
    path = folder / "run.json"
    settings = json.loads(path.read_text())
    change(settings)
    path.write_text(json.dumps(settings))


def test_a_run_without_fingerprints_goes_on_with_a_warning(copy):
    edit_settings(
        copy, lambda settings: [settings.pop(name) for name in ("parts", "made_with", "planned")]
    )
    lines = []
    trap.run(copy, 41, other_training(target=1.1), report=lines.append)
    assert "no fingerprints" in lines[0]
    with pytest.raises(ValueError, match="`objective.terminal`"):  # from now on it has them
        trap.run(copy, 41)


def test_with_another_version_of_jax_only_numbers_are_refused(copy):
    edit_settings(copy, lambda settings: settings["made_with"].update(jax="0.0.1"))
    lines = []
    with pytest.raises(ValueError, match="`times`"):
        trap.run(copy, training=other_training(horizon=2.1))
    trap.run(copy, training=other_training(target=1.1), report=lines.append)
    assert "`objective.terminal` cannot be compared" in lines[0]
    assert f"jax 0.0.1 → {jax.__version__}" in lines[0]


def test_kernels_are_chosen_by_the_iterations_that_were_first_asked_for(tmp_path, monkeypatch):
    planned = []

    def estimator(key, theta, count):
        planned.append(planned_calls())
        return fl.Estimate(theta, theta, theta, jnp.asarray(1.0), jnp.asarray(0.1), count)

    training = fl.Training(estimator, jnp.ones(1), optax.sgd(0.1), trajectories=2)
    fl.run(training, iterations=3, folder=tmp_path / "run")
    fl.run(training, iterations=6, folder=tmp_path / "run")
    assert planned == [3, 3, 3, 3, 4, 5, 6, 6]  # the last call of each run evaluates J
    assert planned_calls() == 1


def test_bad_numbers_are_refused_before_a_folder_is_made(tmp_path):
    for value in (0, 2.5):
        with pytest.raises(ValueError, match=f"`iterations`.*{value}"):
            trap.run(tmp_path / "run", iterations=value)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("name", "value", "fact"),
    [
        ("seed", -1, "`seed`.*got -1"),
        ("seed", 2**63, f"`seed`.*got {2**63}"),
        ("trajectories", 1.5, "`trajectories`.*got 1.5"),
        ("optimiser", 0.1, "`optimiser`.*got float"),
        ("theta", {}, "`theta` has no parameters"),
        ("bounds", 2.0, r"`bounds` must be a pair \(low, high\).*got 2.0"),
        ("bounds", (1.0, 0.0), "got 1.0 and 0.0"),
        ("bounds", ({"q": 0.0}, {"q": 1.0}), "structure of theta"),
    ],
)
def test_a_training_is_valid_when_built(name, value, fact):
    with pytest.raises((ValueError, TypeError), match=fact):
        trap.describe(**{name: value})


def test_folders_that_cannot_take_a_run(copy, tmp_path, monkeypatch):
    (copy / "run.json").rename(copy / "plan.json")  # a run of another kind
    with pytest.raises(ValueError, match=r"not empty.*It is not a run"):
        trap.run(copy)
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "thesis.tex").write_text("")
    with pytest.raises(ValueError, match="It is not a run"):
        trap.run(tmp_path / "own", replace=True)
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(runfolder.shutil, "disk_usage", lambda path: usage._replace(free=2**20))
    with pytest.raises(ValueError, match=r"1 MiB free"):
        trap.run(tmp_path / "new")


def test_a_run_is_replaced_on_request(copy):
    other = trap.describe(seed=5)
    with pytest.raises(ValueError, match="`seed`"):
        trap.run(copy, 3, other)
    trap.run(copy, 3, other, replace=True)
    assert len(history.read(copy / "history.csv")) == 3


def test_two_cannot_write_into_one_folder(tmp_path):
    def intrude(row, record):
        if row.row == 1:
            for replace in (False, True):
                with pytest.raises(ValueError, match="another process"):
                    trap.run(tmp_path / "run", replace=replace)

    trap.run(tmp_path / "run", 3, on_row=intrude)


# --------------------------------------------------------------------------------------- evaluation


def test_training_that_learnt_its_time_grid_is_reported(tmp_path):
    """ẋ = −θx with Euler steps of 1 lands on zero at θ = 1; with half of them at x₀/4."""
    process = fl.Process(lambda th, x: -th * x, lambda th, x: 0.01 * jnp.ones_like(x))
    objective = fl.Objective(terminal=lambda th, x: -(x[0] ** 2))
    estimator = fl.ppgt(fl.simulator(process, jnp.ones(1), jnp.arange(2.0)), objective)
    result = fl.run(
        fl.Training(estimator, jnp.asarray(1.0), optax.sgd(1e-6), trajectories=50),
        iterations=1,
        folder=tmp_path / "run",
    )
    assert abs(result.summary["final"]["J"] + 1e-4) < 4 * result.summary["final"]["J_stderr"]
    exact = -(1 / 16 + 1e-4 * (0.5 + 0.5 * 0.25))
    assert (
        abs(result.summary["finer"]["J"] - exact) < 4 * result.summary["finer"]["J_stderr"] + 1e-6
    )
    assert result.summary["step_matters"] < -3
    assert "time grid" in (tmp_path / "run" / "summary.txt").read_text()


def test_evaluate_takes_estimators_simulators_and_substrates():
    estimator, theta = trap.describe().estimator, trap.THETA
    one = fl.evaluate(estimator, theta, count=200)
    assert one == fl.evaluate(trap.SIMULATOR, theta, count=200, objective=trap.OBJECTIVE)

    class Recorded:
        def __call__(self, key, theta, count):
            return trap.SIMULATOR(key, theta, count)

    stored = fl.evaluate(Recorded(), theta, count=200, objective=trap.OBJECTIVE)
    assert pytest.approx(one.J, rel=1e-5) == stored.J
    assert fl.evaluate(estimator, theta, count=200, refine=4).dt == pytest.approx(one.dt / 4)
    with pytest.raises(ValueError, match="Recorded.*`refine`"):
        fl.evaluate(Recorded(), theta, objective=trap.OBJECTIVE, refine=2)
    with pytest.raises(ValueError, match="`objective=`"):
        fl.evaluate(trap.SIMULATOR, theta)
    with pytest.raises(ValueError, match="`refine`.*got 0"):
        fl.evaluate(estimator, theta, refine=0)


# ------------------------------------------------------------------------------------- fingerprints


@pytest.mark.parametrize("name", ["history.csv", "parameters.h5", "checkpoint"])
def test_a_file_of_another_run_is_named(copy, tmp_path, name):
    other = tmp_path / "other"
    trap.run(other, training=trap.describe(seed=4))
    if name == "checkpoint":
        shutil.rmtree(copy / "checkpoints")
        shutil.copytree(other / "checkpoints", copy / "checkpoints")
        name = checkpoint.list_checkpoints(copy / "checkpoints")[-1].name
    else:
        shutil.copy(other / name, copy / name)
    with pytest.raises(ValueError, match=f"{name} is of another run"):
        trap.run(copy, 45)
