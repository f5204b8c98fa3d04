"""The noise of an evaluation is in no iteration of a training with its seed, however long that is.

Iteration l has the key fold_in(key(seed), l), and an evaluation a key of that form.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fluctua as fl
import trap

ITERATIONS = 80
SEED = 3


class Device:
    """A trap that is measured, with the noise of the key it gets, and keeps the first states."""

    def __init__(self):
        self.measured = []

    def __call__(self, key, theta, count):
        x = trap.SIMULATOR(key, {"f": jnp.zeros(1)}, count).x
        self.measured.append(float(x[0, 1, 0]))
        return fl.Trajectories(trap.SIMULATOR.t, x)


def make_estimator(kind, device):
    if kind == "self-calibrating":
        model = fl.ppgt(trap.SIMULATOR, trap.OBJECTIVE, baseline=fl.Twin())
        shift = lambda theta, phi: {"f": theta["f"] + phi}
        return fl.SelfCalibrating(
            model, device, shift, jnp.zeros(()), spread=0.2, on_doubt="continue"
        )
    if kind == "substrate":
        return fl.ppgt(device, trap.OBJECTIVE, process=trap.PROCESS)

    def estimate(key, theta, count):
        R = fl.returns(trap.OBJECTIVE, theta, device(key, theta, count))
        one = {"f": jnp.ones(1)}
        return fl.Estimate(one, one, one, jnp.asarray(R.mean()), jnp.asarray(1.0), count)

    return estimate


@pytest.mark.filterwarnings("ignore:the residuals")
@pytest.mark.parametrize(
    "kind", [pytest.param("self-calibrating", marks=pytest.mark.long), "substrate", "function"]
)
def test_the_final_evaluation_has_noise_of_its_own(tmp_path, kind):
    device = Device()
    training = fl.Training(
        make_estimator(kind, device), trap.THETA, optax.sgd(1e-9), trajectories=2, seed=SEED
    )
    result = fl.run(training, ITERATIONS, tmp_path / "run", parameters_every=0, progress=False)
    assert result.summary["final"]["source"] in ("device", "estimator")
    assert len(device.measured) == ITERATIONS + 1
    assert len(set(device.measured)) == ITERATIONS + 1


def test_an_evaluation_shares_no_noise_with_a_training_of_its_seed():
    """`pathwise` draws with the very key of an iteration, as a simulator does."""
    evaluated = fl.evaluate_many(
        trap.SIMULATOR, {"f": jnp.zeros((1, 1))}, count=1, seed=SEED, objective=trap.OBJECTIVE
    )
    drawn = [
        float(-((trap.SIMULATOR(key, trap.THETA, 1).x[0, -1, 0] - 1) ** 2))
        for key in (jax.random.fold_in(jax.random.key(SEED), k) for k in range(ITERATIONS))
    ]
    assert np.abs(np.asarray(drawn) - evaluated.J[0]).min() > 1e-9


def test_another_objective_is_integrated_as_that_of_the_estimator():
    """A device that moves in Heun's steps: the trapezoid rule, 2 and not 1 for X = 0, 1, 2."""
    process = fl.Process(lambda th, x: th["f"], lambda th, x: jnp.ones(1), integrator="heun")
    line = fl.Trajectories(jnp.arange(3.0), jnp.arange(3.0)[None, :, None] * jnp.ones((4, 1, 1)))
    height = fl.Objective(running=lambda th, x: x[0])
    estimator = fl.ppgt(lambda key, theta, count: line, height, process=process)
    for objective in (None, height):
        assert fl.evaluate(estimator, trap.THETA, count=4, objective=objective).J == 2.0


@pytest.mark.parametrize("evaluate", [fl.evaluate, fl.evaluate_many])
def test_an_estimator_in_place_of_a_substrate_is_refused_and_not_called(evaluate):
    device = Device()
    calibrating = make_estimator("self-calibrating", device)
    spsa = fl.reference.spsa(trap.OBJECTIVE, trap.SIMULATOR)
    theta = {"f": jnp.zeros((2, 1))}
    for estimator in (calibrating, spsa):
        name = type(estimator).__name__
        with pytest.raises(TypeError, match=rf"{name}.*`objective=`"):
            evaluate(estimator, theta, count=5, objective=trap.OBJECTIVE)
    with pytest.raises(TypeError, match="SelfCalibrating.*one θ"):
        evaluate(calibrating, theta, count=5, refine=2)
    with pytest.raises(TypeError, match="SelfCalibrating"):
        fl.evaluate_many(calibrating, theta, count=5)
    assert device.measured == []
