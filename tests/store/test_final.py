"""Evaluation of the final parameters on a device: measured afresh, counted, and never a loss."""

import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fluctua as fl
import trap
from fluctua.store import history


def exact_value(theta):
    """J of the trap with Euler's steps, E[−(X_T − 1)²], and the variance of one return."""
    dt = 0.1
    mean = 0.0
    variance = 0.0
    for _ in range(20):
        mean += dt * (float(theta["f"][0]) - mean)
        variance = (1 - dt) ** 2 * variance + 0.09 * dt
    away = mean - 1
    return -(away**2) - variance, 4 * away**2 * variance + 2 * variance**2


class Device:
    """A trap that is measured: it counts, and may fail."""

    def __init__(self):
        self.counts = []
        self.fails_from = 10**9

    def __call__(self, key, theta, count):
        if len(self.counts) >= self.fails_from:
            raise OSError("no trigger")
        self.counts.append(count)
        return trap.SIMULATOR(key, theta, count)


def describe(device, trajectories=6):
    estimator = fl.ppgt(device, trap.OBJECTIVE, process=trap.PROCESS)
    return trap.describe(estimator=estimator, trajectories=trajectories)


def self_calibrating(device, **options):
    model = fl.ppgt(trap.SIMULATOR, trap.OBJECTIVE, baseline=fl.Twin())
    shifted = lambda theta, phi: {"f": theta["f"] + phi}
    return fl.SelfCalibrating(model, device, shifted, jnp.zeros(()), spread=0.2, **options)


def read_summary(folder):
    return json.loads((folder / "summary.json").read_text())


@pytest.mark.parametrize("kind", ["substrate", "self-calibrating"])
def test_a_device_measures_the_final_parameters(tmp_path, kind):
    device = Device()
    training = describe(device)
    if kind == "self-calibrating":
        training = trap.describe(estimator=self_calibrating(device), trajectories=6)
    result = trap.run(tmp_path / "run", 4, training, final_trajectories=4000)
    final = result.summary["final"]
    value, variance = exact_value(result.theta)
    assert final["trajectories"] == 4000
    assert final["source"] == "device"
    assert final["J_stderr"] == pytest.approx(np.sqrt(variance / 4000), rel=0.1)
    assert abs(final["J"] - value) < 4 * final["J_stderr"]
    assert device.counts[-1] == 4000
    assert result.summary["trajectories"] == sum(device.counts)
    assert history.read(tmp_path / "run" / "history.csv")[-1].trajectories == 4 * 6
    text = repr(result)
    assert "measured afresh with 4,000 trajectories of the device" in text
    assert f"{sum(device.counts):,} trajectories" in text


def test_the_default_is_an_iteration_and_20_at_least(tmp_path):
    few, many = Device(), Device()
    trap.run(tmp_path / "few", 2, describe(few, 6))
    trap.run(tmp_path / "many", 2, describe(many, 30))
    assert few.counts[-1] == 20
    assert many.counts == [30, 30, 30]


def test_it_can_be_switched_off(tmp_path):
    device = Device()
    result = trap.run(tmp_path / "run", 3, describe(device), final_trajectories=0)
    assert device.counts == [6, 6, 6]
    assert "final" not in result.summary
    assert "of the last iteration, not measured afresh" in repr(result)
    assert trap.run(tmp_path / "run", 3, describe(device)).summary == result.summary
    later = trap.run(tmp_path / "run", 3, describe(device), final_trajectories=9)
    assert device.counts == [6, 6, 6, 9]
    assert later.summary["final"]["trajectories"] == 9
    simulated = trap.run(tmp_path / "simulated", 3, final_trajectories=0)
    assert "final" not in simulated.summary
    sized = trap.run(tmp_path / "sized", 3, final_trajectories=77)
    assert sized.summary["final"]["trajectories"] == 77
    rows = history.read(tmp_path / "sized" / "history.csv")
    assert sized.summary["trajectories"] == rows[-1].trajectories  # simulated, not measured
    with pytest.raises(ValueError, match="`final_trajectories` must be 2 or more.*got 1"):
        trap.run(tmp_path / "one", 3, final_trajectories=1)
    with pytest.raises(ValueError, match="`final_trajectories`.*-1"):
        trap.run(tmp_path / "negative", 3, final_trajectories=-1)


def test_a_complete_run_is_not_measured_again_and_a_longer_one_counts_both(tmp_path):
    device = Device()
    first = trap.run(tmp_path / "run", 3, describe(device))
    again = trap.run(tmp_path / "run", 3, describe(device))
    assert again.summary == first.summary
    assert device.counts == [6, 6, 6, 20]
    longer = trap.run(tmp_path / "run", 5, describe(device))
    assert device.counts == [6, 6, 6, 20, 6, 6, 20]
    assert longer.summary["trajectories"] == sum(device.counts)
    rows = history.read(tmp_path / "run" / "history.csv")
    assert [row.trajectories for row in rows] == [6, 12, 18, 44, 50]
    whole = trap.run(tmp_path / "whole", 5, describe(Device()))
    np.testing.assert_array_equal(longer.theta["f"], whole.theta["f"])
    assert longer.summary["final"]["J"] == whole.summary["final"]["J"]


def test_a_device_that_fails_at_the_end_loses_nothing(tmp_path):
    device = Device()
    device.fails_from = 3
    with pytest.warns(RuntimeWarning, match="OSError: no trigger"):
        result = trap.run(tmp_path / "run", 3, describe(device))
    assert "final" not in result.summary
    assert result.summary["final_failed"] == "OSError: no trigger"
    assert result.summary["trajectories"] == 18
    assert re.search(r"not measured afresh\n +OSError: no trigger", repr(result))
    whole = trap.run(tmp_path / "whole", 3, describe(Device()))
    np.testing.assert_array_equal(result.theta["f"], whole.theta["f"])
    device.fails_from = 10**9
    mended = trap.run(tmp_path / "run", 3, describe(device))  # measures, and trains no more
    assert device.counts == [6, 6, 6, 20]
    assert mended.summary["final"] == whole.summary["final"]
    assert read_summary(tmp_path / "run") == mended.summary


def test_ctrl_c_during_the_evaluation_keeps_the_training(tmp_path):
    device = Device()

    def interrupt(key, theta, count):
        if len(device.counts) == 3:
            device.counts.append(0)
            raise KeyboardInterrupt
        return device(key, theta, count)

    with pytest.raises(KeyboardInterrupt):
        trap.run(tmp_path / "run", 3, describe(interrupt))
    assert not (tmp_path / "run" / "summary.json").exists()
    result = trap.run(tmp_path / "run", 3, describe(interrupt))
    assert device.counts == [6, 6, 6, 0, 20]
    assert result.summary["final"]["trajectories"] == 20


def test_a_summary_of_an_earlier_end_is_not_returned(tmp_path):
    """As after a kill between the last row and the summary."""
    trap.run(tmp_path / "run", 3)
    early = (tmp_path / "run" / "summary.json").read_bytes()
    whole = trap.run(tmp_path / "run", 5)
    (tmp_path / "run" / "summary.json").write_bytes(early)
    again = trap.run(tmp_path / "run", 5)
    assert again.summary == whole.summary


def test_a_summary_is_removed_as_soon_as_a_run_goes_on(tmp_path):
    trap.run(tmp_path / "run", 3)

    def stop(row, record):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        trap.run(tmp_path / "run", 5, on_row=stop)
    assert not list((tmp_path / "run").glob("summary.*"))


def test_devices_of_an_array_count_the_same():
    """However many trajectories each has; errors are those between devices."""
    forces = (0.5, 0.0, -0.5)
    sizes = (3000, 2000, 1000)

    def array(key, theta, count):
        assert count == sum(sizes)
        keys = jax.random.split(key, 3)
        parts = [
            trap.SIMULATOR(k, {"f": theta["f"] + force}, size)
            for k, force, size in zip(keys, forces, sizes, strict=True)
        ]
        x = jnp.concatenate([part.x for part in parts])
        return parts[0]._replace(x=x, group=np.repeat([0, 1, 2], sizes))

    theta = {"f": jnp.array([0.7])}
    measured = fl.evaluate(array, theta, count=6000, objective=trap.OBJECTIVE)
    exact = [exact_value({"f": theta["f"] + force}) for force in forces]
    error = np.sqrt(sum(variance / n for (_, variance), n in zip(exact, sizes, strict=True))) / 3
    values = [value for value, _ in exact]
    assert abs(measured.J - np.mean(values)) < 4 * error
    assert measured.J_stderr == pytest.approx(np.std(values, ddof=1) / np.sqrt(3), rel=0.1)


def test_a_chain_is_evaluated_by_its_simulator(tmp_path):
    """Its steps cannot be split, and are not. One spin that is drawn anew: E[s] = σ(b)."""
    chain = fl.Chain(
        sample=lambda key, theta, x: jax.random.bernoulli(
            key, jax.nn.sigmoid(theta["bias"]), x.shape
        ),
        log_prob=lambda theta, x, x_next: jnp.sum(
            jax.nn.log_sigmoid((2 * x_next - 1) * theta["bias"])
        ),
    )
    simulator = fl.simulator(chain, jnp.zeros(1), jnp.arange(4.0))
    estimator = fl.ppgt(simulator, fl.Objective(terminal=lambda theta, x: x[0]))
    theta = {"bias": jnp.array(0.0)}
    training = fl.Training(estimator, theta, optax.sgd(0.5), trajectories=10)
    result = fl.run(training, 2, tmp_path / "run")
    final = result.summary["final"]
    exact = 1 / (1 + np.exp(-float(result.theta["bias"])))
    assert abs(final["J"] - exact) < 4 * final["J_stderr"]
    assert final["trajectories"] == 256
    assert "finer" not in result.summary
    assert "measured afresh with 256 trajectories\n" in repr(result)


def test_evaluate_measures_on_the_device_of_a_self_calibrating_estimator():
    device = Device()
    estimator = self_calibrating(device)
    theta = {"f": jnp.array([0.7])}
    value, _ = exact_value(theta)
    measured = fl.evaluate(estimator, theta, count=2000)
    assert abs(measured.J - value) < 4 * measured.J_stderr
    assert device.counts == [2000]
    assert estimator.state == {}  # nothing is learnt
    assert measured.dt == pytest.approx(0.1)


def test_an_estimator_with_a_state_keeps_it(tmp_path):
    class Counting:
        def __init__(self):
            self.calls = 0

        def __call__(self, key, theta, count):
            self.calls += 1
            one = {"f": jnp.ones(1)}
            return fl.Estimate(one, one, one, jnp.asarray(0.5), jnp.asarray(0.1), count)

        def cost(self, theta):
            return 3

        pilot = 7

        @property
        def state(self):
            return {"calls": np.array(self.calls)}

        def restore(self, state, theta):
            self.calls = int(state["calls"])

    counting = Counting()
    training = fl.Training(counting, trap.THETA, optax.sgd(0.1), trajectories=2)
    result = fl.run(training, 4, tmp_path / "run")
    assert counting.calls == 4
    assert result.summary["final"] == {
        "J": 0.5,
        "J_stderr": pytest.approx(0.1),
        "trajectories": 13,
        "source": "estimator",
    }
    assert result.summary["trajectories"] == 5 * 13
