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
    return folder, fl.run(folder, *trap.arguments(), **trap.OPTIONS)


@pytest.fixture
def copy(whole, tmp_path):
    return Path(shutil.copytree(whole[0], tmp_path / "copy"))


def test_it_is_the_training_that_train_gives(whole):
    folder, result = whole
    estimator, theta, rule = trap.arguments()
    records = list(fl.train(jax.random.key(3), theta, estimator, rule, count=20, iterations=40))
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


def command(folder, how):
    environment = environment_to_die_in(
        folder.parent, JAX_ENABLE_X64="1"
    )  # the precision of this process
    return subprocess.Popen(
        [sys.executable, SCRIPT, folder, how], stdout=subprocess.DEVNULL, env=environment
    )


@pytest.mark.long
def test_killed_at_random_moments_it_goes_on_to_the_bit(whole, tmp_path):
    """SIGKILL for real, several times, wherever the process is; then to the end, here."""
    folder, draw, kills, how = tmp_path / "killed", random.Random(1), 0, "run"
    for target in (0, 8, 20, 33):
        process = command(folder, how)
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
        how = "resume"
    assert kills >= 3
    fl.resume(folder, *trap.arguments(), **trap.OPTIONS)
    same(whole[0], folder)


def test_stopped_by_whoever_watches_and_extended(whole, tmp_path):
    def stop(row, record):
        if row.iteration == 11:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fl.run(
            tmp_path / "run", *trap.arguments(), **{**trap.OPTIONS, "iterations": 25}, on_row=stop
        )
    assert len(history.read(tmp_path / "run" / "history.csv")) == 12
    fl.resume(tmp_path / "run", *trap.arguments(), **{**trap.OPTIONS, "iterations": 25})
    fl.resume(tmp_path / "run", *trap.arguments(), **trap.OPTIONS)
    same(whole[0], tmp_path / "run")


def test_a_complete_run_is_returned_as_it_is(whole):
    folder, result = whole
    again = fl.resume(
        folder, *trap.arguments(), **trap.OPTIONS, on_row=lambda row, record: pytest.fail("a row")
    )
    np.testing.assert_array_equal(again.theta["f"], result.theta["f"])
    assert again.summary == result.summary


def test_an_estimator_that_remembers_goes_on_with_its_memory(tmp_path):
    twin = lambda: fl.ShrunkCorrection(
        fl.ppgt(trap.PROCESS, trap.OBJECTIVE, trap.SIMULATOR, baseline=fl.Twin()), memory=5
    )
    words = (trap.THETA, optax.adam(0.1))
    options = {"count": 8, "iterations": 6, "checkpoint_seconds": 0.0}
    fl.run(tmp_path / "whole", twin(), *words, **options)

    def stop(row, record):
        if row.iteration == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fl.run(tmp_path / "cut", twin(), *words, **options, on_row=stop)
    fl.resume(tmp_path / "cut", twin(), *words, **options)
    same(tmp_path / "whole", tmp_path / "cut")


def test_any_tree_of_parameters_has_names(tmp_path):
    def estimator(key, theta, count):
        zero = jax.tree.map(jnp.zeros_like, theta)
        one = jax.tree.map(jnp.ones_like, theta)
        return fl.Estimate(one, zero, one, jnp.asarray(1.0), jnp.asarray(0.1), count)

    theta = {"row": jnp.zeros(2), "net": [jnp.zeros(()), {"w": jnp.zeros((2, 3))}]}
    result = fl.run(tmp_path / "run", estimator, theta, optax.sgd(0.1), count=2, iterations=3)
    assert "final" not in result.summary
    assert "no simulator" in (tmp_path / "run" / "summary.txt").read_text()
    with np.load(tmp_path / "run" / "final.npz") as final:
        assert sorted(final.files) == ["net.0", "net.1.w", "row"]
        np.testing.assert_allclose(final["net.1.w"], 0.3, rtol=1e-6)


# ---------------------------------------------------------------------------------- what is refused


def test_what_may_not_change(whole):
    folder, _ = whole
    estimator, theta, rule = trap.arguments()
    for arguments, options, name in (
        ((theta, rule), {"seed": 4}, "`seed` was 3 and is 4"),
        ((theta, rule), {"count": 21}, "`count` was 20 and is 21"),
        (({"f": jnp.ones(1)}, rule), {}, "`theta`, the start"),
        (({"f": jnp.ones(2)}, rule), {}, "`parameters` was"),
    ):
        with pytest.raises(ValueError, match=name):
            fl.resume(folder, estimator, *arguments, **{**trap.OPTIONS, **options})


def other_training(**changes):
    """The trap of `trap.py` with another drift, noise, reward or time grid."""
    drift = changes.get("drift", lambda th, x: th["f"] - x)
    process = fl.Process(drift, lambda th, x: changes.get("noise", 0.3) * jnp.ones_like(x))
    objective = fl.Objective(terminal=lambda th, x: -((x[0] - changes.get("target", 1)) ** 2))
    substrate = fl.simulator(process, jnp.zeros(1), jnp.linspace(0, changes.get("horizon", 2), 21))
    return fl.ppgt(process, objective, substrate, baseline=changes.get("baseline")), trap.THETA


@pytest.mark.parametrize(
    ("changes", "options", "name"),
    [
        ({"drift": lambda th, x: th["f"] - 1.01 * x}, {}, "`process.drift`"),
        ({"noise": 0.31}, {}, "`process.noise`"),
        ({"target": 1.1}, {}, "`objective.terminal`"),
        ({"horizon": 2.1}, {}, "`times`"),
        ({"baseline": "mean"}, {}, "`baseline.name` was 'time' and is 'mean'"),
        ({}, {"rate": 0.11}, "`optimiser`"),
        ({}, {"project": fl.box(-1.0, 1.0)}, "`project`"),
    ],
)
def test_other_code_is_refused_by_name(whole, changes, options, name):
    rule = optax.adam(options.pop("rate", 0.1))
    with pytest.raises(ValueError, match=name):
        fl.resume(whole[0], *other_training(**changes), rule, **{**trap.OPTIONS, **options})


def test_the_same_training_in_other_words_goes_on(copy):
    report = lambda text: pytest.fail(text)
    fl.resume(
        copy,
        *other_training(),
        optax.adam(0.1),
        **{**trap.OPTIONS, "iterations": 41},
        report=report,
    )


def test_a_count_that_is_a_function_is_compared_by_its_values(tmp_path):
    go = lambda how, count, iterations: how(
        tmp_path / "run", *trap.arguments(), count=count, iterations=iterations, seed=3
    )
    go(fl.run, lambda iteration: 2 + iteration, 3)
    go(fl.resume, lambda step: step + 2, 4)
    with pytest.raises(ValueError, match="`count`"):
        go(fl.resume, lambda iteration: 3 + iteration, 4)


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
    changed = other_training(target=1.1)
    options = {**trap.OPTIONS, "iterations": 41}
    fl.resume(copy, *changed, optax.adam(0.1), **options, report=lines.append)
    assert "no fingerprints" in lines[0]
    with pytest.raises(ValueError, match="`objective.terminal`"):  # from now on it has them
        fl.resume(copy, *trap.arguments(), **options)


def test_with_another_version_of_jax_only_numbers_are_refused(copy):
    edit_settings(copy, lambda settings: settings["made_with"].update(jax="0.0.1"))
    lines = []
    with pytest.raises(ValueError, match="`times`"):
        fl.resume(copy, *other_training(horizon=2.1), optax.adam(0.1), **trap.OPTIONS)
    fl.resume(
        copy, *other_training(target=1.1), optax.adam(0.1), **trap.OPTIONS, report=lines.append
    )
    assert "`objective.terminal` cannot be compared" in lines[0]
    assert f"jax 0.0.1 → {jax.__version__}" in lines[0]


def test_kernels_are_chosen_by_the_iterations_that_were_first_asked_for(tmp_path, monkeypatch):
    planned = []

    def estimator(key, theta, count):
        planned.append(planned_calls())
        return fl.Estimate(theta, theta, theta, jnp.asarray(1.0), jnp.asarray(0.1), count)

    arguments = (tmp_path / "run", estimator, jnp.ones(1), optax.sgd(0.1))
    fl.run(*arguments, count=2, iterations=3)
    fl.resume(*arguments, count=2, iterations=6)
    assert planned == [3, 3, 3, 4, 5, 6]
    assert planned_calls() == 1


def test_bad_numbers_are_refused_before_a_folder_is_made(tmp_path):
    for name, value in (
        ("iterations", 0),
        ("iterations", 2.5),
        ("seed", -1),
        ("seed", 2**63),
        ("count", 1.5),
    ):
        with pytest.raises((ValueError, TypeError), match=str(value)):
            fl.run(tmp_path / "run", *trap.arguments(), **{**trap.OPTIONS, name: value})
    assert not (tmp_path / "run").exists()


def test_folders_that_cannot_take_a_run(copy, tmp_path, monkeypatch):
    with pytest.raises(ValueError, match=r"not empty.*fluctua.resume.*replace=True"):
        fl.run(copy, *trap.arguments(), **trap.OPTIONS)
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "thesis.tex").write_text("")
    with pytest.raises(ValueError, match="It is not a run"):
        fl.run(tmp_path / "own", *trap.arguments(), **trap.OPTIONS, replace=True)
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(runfolder.shutil, "disk_usage", lambda path: usage._replace(free=2**20))
    with pytest.raises(ValueError, match=r"1 MiB free"):
        fl.run(tmp_path / "new", *trap.arguments(), **trap.OPTIONS)


def test_two_cannot_write_into_one_folder(tmp_path):
    def intrude(row, record):
        if row.row == 1:
            for how in (fl.run, fl.resume):
                with pytest.raises(ValueError, match="another process"):
                    how(tmp_path / "run", *trap.arguments(), **trap.OPTIONS)

    fl.run(tmp_path / "run", *trap.arguments(), **{**trap.OPTIONS, "iterations": 3}, on_row=intrude)


# --------------------------------------------------------------------------------------- evaluation


def test_training_that_learnt_its_time_grid_is_told(tmp_path):
    """ẋ = −θx with Euler steps of 1 lands on zero at θ = 1; with half of them at x₀/4."""
    process = fl.Process(lambda th, x: -th * x, lambda th, x: 0.01 * jnp.ones_like(x))
    objective = fl.Objective(terminal=lambda th, x: -(x[0] ** 2))
    estimator = fl.ppgt(process, objective, fl.simulator(process, jnp.ones(1), jnp.arange(2.0)))
    result = fl.run(
        tmp_path / "run", estimator, jnp.asarray(1.0), optax.sgd(1e-6), count=50, iterations=1
    )
    assert abs(result.summary["final"]["J"] + 1e-4) < 4 * result.summary["final"]["J_stderr"]
    exact = -(1 / 16 + 1e-4 * (0.5 + 0.5 * 0.25))
    assert (
        abs(result.summary["finer"]["J"] - exact) < 4 * result.summary["finer"]["J_stderr"] + 1e-6
    )
    assert result.summary["step_matters"] < -3
    assert "time grid" in (tmp_path / "run" / "summary.txt").read_text()


def test_evaluate_takes_estimators_simulators_and_substrates():
    estimator, theta, _ = trap.arguments()
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
    fl.run(other, *trap.arguments(), **{**trap.OPTIONS, "seed": 4})
    if name == "checkpoint":
        shutil.rmtree(copy / "checkpoints")
        shutil.copytree(other / "checkpoints", copy / "checkpoints")
        name = checkpoint.listed(copy / "checkpoints")[-1].name
    else:
        shutil.copy(other / name, copy / name)
    with pytest.raises(ValueError, match=f"{name} is of another run"):
        fl.resume(copy, *trap.arguments(), **{**trap.OPTIONS, "iterations": 45})
