"""The fused kernels behind a task: number by number the JAX reference, on the same noise."""

import json
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from typer.testing import CliRunner

from fluctua import evaluate, fisher, natural, tcmt
from fluctua.cli.app import app
from fluctua.core.baselines import binned, time_only
from fluctua.core.streamed import split_key
from fluctua.runs.build import resolve_backend
from fluctua.tcmt.kernel.options import Binned
from fluctua.tcmt.kernel.twin import KernelTwin
from fluctua.tcmt.tasks import custom

KEY = jax.random.key(4)
ALL = ("omega", "kappa", "chi", "gamma_e", "gamma")


def start(network, train=ALL):
    """Random parameters, so that no symmetry hides an index."""
    rng = np.random.default_rng(1)
    theta = {name: getattr(network, name) + 0.1 * rng.random(network.shape(name)) for name in train}
    if "chi" in theta:
        theta["chi"] = theta["chi"] + 0.02 * rng.normal(size=network.sites)
    return theta


def assert_same(a, b, rtol):
    for one, other in zip(a[:3], b[:3], strict=True):
        for name in one:
            size = np.abs(one[name]).max(initial=0.0)
            np.testing.assert_allclose(
                other[name], one[name], rtol=0, atol=rtol * size, err_msg=name
            )
    np.testing.assert_allclose([b.value, b.value_stderr], [a.value, a.value_stderr], rtol=rtol)
    assert a.count == b.count


@pytest.mark.filterwarnings(
    "ignore:Euler steps"
)  # strong Kerr shifts and the lab frame, on purpose
@pytest.mark.parametrize(
    ("make", "options"),
    [
        pytest.param(tcmt.transmission, {}, marks=pytest.mark.long),
        (tcmt.isolation, {"sigma_kappa": 0.2}),  # two copies, each with its own modulation
        (
            tcmt.isolation,
            {"frame": "lab", "drive": tcmt.Drive(0, frequency=10.0, envelope=jnp.cos)},
        ),
    ],
)
def test_every_family_equals_the_reference(make, options):
    task = make(tcmt.rectangular(3, 4), horizon=0.5, dt=5e-3, **options)
    theta = start(task.network)
    assert_same(
        task.estimator("jax")(KEY, theta, 12),
        task.estimator("cpu", dtype="float64")(KEY, theta, 12),
        rtol=1e-9,
    )


@pytest.mark.filterwarnings("ignore:Euler steps")
@pytest.mark.parametrize(
    "network",
    [
        tcmt.honeycomb(3, 4),
        pytest.param(tcmt.ring(7), marks=pytest.mark.long),
        tcmt.chain(1, leads=(0,)),
    ],
)
def test_every_graph_equals_the_reference(network):
    task = tcmt.transmission(network, to=network.leads - 1, horizon=0.5, dt=5e-3)
    theta = start(network, ("omega", "kappa", "chi"))
    table = time_only(np.linspace(0.3, 0, 101))  # a pilot would be one more program for JAX
    assert_same(
        task.estimator("jax", baseline=table)(KEY, theta, 10),
        task.estimator("cpu", baseline=table, dtype="float64")(KEY, theta, 10),
        rtol=1e-9,
    )


@pytest.mark.parametrize("baseline", ["none", time_only(np.linspace(0.3, 0, 101))])
def test_baselines_equal_the_reference(baseline):
    task = tcmt.transmission(tcmt.rectangular(2, 3), horizon=0.5, dt=5e-3)
    theta = start(task.network, ("omega", "kappa"))
    reference = task.estimator("jax", baseline=baseline)(KEY, theta, 20)
    assert_same(
        reference,
        task.estimator("cpu", baseline=baseline, dtype="float64")(KEY, theta, 20),
        rtol=1e-9,
    )


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:Euler steps")
def test_binned_baseline_equals_the_reference():
    task = tcmt.transmission(tcmt.rectangular(2, 3), horizon=0.3, dt=5e-3)
    theta = start(task.network, ("omega", "kappa", "chi"))
    reference = task.estimator("jax", baseline="binned")(KEY, theta, 90)
    fused = task.estimator("cpu", baseline=Binned(every=1), dtype="float64")(KEY, theta, 90)
    assert_same(reference, fused, rtol=1e-9)
    later = task.estimator("cpu", baseline=binned(every=100), dtype="float64")(KEY, theta, 90)
    for name in theta:  # other bins, the same mean: apart by less than the errors
        assert (
            np.abs((later.gradient[name] - reference.gradient[name]) / reference.stderr[name]).max()
            < 2
        )


@pytest.mark.long
def test_full_horizon_of_the_papers_lattice_in_single_precision():
    """20,000 steps of 143 resonators: the kernel in float32 against the reference in float64."""
    task = tcmt.transmission(tcmt.paper(), sigma_kappa=0.2)
    theta = tcmt.initial_parameters(jax.random.key(0), task.network)
    result = task.estimator("cpu", baseline="none").run(KEY, theta, 2, record_every=2000)
    x = task.simulator()(split_key(KEY)[0], theta, 2).x[:, ::2000]
    psi = np.asarray(x[..., :143] + 1j * x[..., 143:])
    deviation = np.abs(result.trajectories - psi).max() / np.abs(psi).max()
    assert deviation < 1e-5  # measured 1e-6; one rounding is 6e-8


def test_samples_average_to_the_estimate():
    task = tcmt.transmission(tcmt.rectangular(2, 3), horizon=0.5, dt=5e-3)
    theta = start(task.network, ("kappa", "gamma"))
    estimator = task.estimator("cpu")
    samples, estimate = estimator.samples(KEY, theta, 16), estimator(KEY, theta, 16)
    for name in theta:
        np.testing.assert_allclose(
            samples.gradient[name].mean(axis=0), estimate.gradient[name], rtol=1e-4, atol=1e-7
        )


def test_an_estimate_has_the_families_and_the_types_of_theta():
    task = tcmt.transmission(tcmt.rectangular(2, 3), horizon=0.1, dt=5e-3)
    theta = start(task.network, ("omega", "chi", "kappa"))
    theta = {
        "kappa": jnp.asarray(theta["kappa"]),
        "omega": jnp.asarray(theta["omega"], jnp.float32),
        "chi": jnp.asarray(theta["chi"] / 10),
    }
    estimate, result = task.estimator("cpu").with_result(KEY, theta, 8)
    for part in ("gradient", "stderr", "second_moment"):
        leaves, expected = getattr(estimate, part), getattr(result, part)
        assert leaves.keys() == theta.keys()
        for name, leaf in leaves.items():
            np.testing.assert_array_equal(
                leaf, getattr(expected, name).astype(theta[name].dtype), strict=True
            )
    assert (float(estimate.value), float(estimate.value_stderr)) == (
        result.value,
        result.value_stderr,
    )


def test_parameters_that_are_not_finite_are_named():
    task = tcmt.transmission(tcmt.chain(3), horizon=0.1, dt=0.01)
    theta = start(task.network, ("omega", "chi"))
    bad = {**theta, "chi": np.where(np.arange(3) == 1, np.nan, theta["chi"])}
    estimator = task.estimator("cpu", baseline="twin")
    for call in (estimator, estimator.samples, estimator.split):
        with pytest.raises(ValueError, match=r"`theta\['chi'\]` is not finite"):
            call(KEY, bad, 4)
    twin = task.estimator("cpu", baseline=KernelTwin(theta=lambda _: bad))
    with pytest.raises(ValueError, match=r"`theta\['chi'\]` is not finite"):
        twin(KEY, theta, 4)


NATURAL = tcmt.transmission(tcmt.rectangular(2, 3), horizon=0.5, dt=5e-3)


@cache
def reference_scores(count):
    """Scores of three blocks, and the natural gradient, by JAX."""
    theta = start(NATURAL.network, ("omega", "kappa"))
    trajectories = NATURAL.simulator()(split_key(KEY)[0], theta, count)
    rows = fisher(NATURAL.process, theta, trajectories, blocks=3).rows
    steps = natural(NATURAL.estimator("jax", baseline="none"), blocks=3)(KEY, theta, count)
    return np.asarray(rows), jax.tree.map(np.asarray, steps.natural)


@pytest.mark.long
@pytest.mark.parametrize("baseline", ["time", "carried", "twin"])
def test_natural_gradient_equals_the_reference(baseline):
    """Scores from two runs that differ by λ̄ = 1 on a block, against scores themselves."""
    theta = start(NATURAL.network, ("omega", "kappa"))
    reference, expected = reference_scores(40)
    rows = NATURAL.estimator("cpu", baseline=baseline, dtype="float64").scores(KEY, theta, 40, 3)
    np.testing.assert_allclose(rows, reference, rtol=0, atol=1e-8 * np.abs(reference).max())
    kernel = natural(NATURAL.estimator("cpu", baseline="none", dtype="float64"), blocks=3)(
        KEY, theta, 40
    )
    for name, value in expected.items():
        np.testing.assert_allclose(
            kernel.natural[name], value, rtol=1e-3, atol=1e-6 * np.abs(value).max()
        )


def test_what_the_kernels_refuse_names_the_jax_path():
    wide = tcmt.from_edges([(0, 1), (1, 2)], leads=[tcmt.Lead({0: 0.8, 1: 0.6}), 2])
    with pytest.raises(ValueError, match=r"several resonators.*backend=\"jax\""):
        tcmt.transmission(wide, horizon=0.1, dt=0.01).estimator("cpu")
    own = custom(tcmt.chain(3), tcmt.Drive(0), lambda theta, x, t: x[0], horizon=0.1, dt=0.01)
    with pytest.raises(ValueError, match=r"this task has another.*backend=\"jax\""):
        own.estimator("cpu")
    task = tcmt.transmission(tcmt.chain(3), horizon=0.1, dt=0.01)
    with pytest.raises(ValueError, match="does not support the baseline .mean."):
        task.estimator("cpu", baseline="mean")
    with pytest.raises(ValueError, match="at least 2; got 1"):
        task.estimator("cpu")(KEY, start(task.network), 1)
    with pytest.raises(
        TypeError, match="first_trajectory"
    ):  # it is called `first` here, and would be passed over
        task.estimator("cpu").run(KEY, start(task.network), 4, first_trajectory=8)


def test_an_evaluation_names_the_simulator_of_the_task():
    task = tcmt.transmission(tcmt.rectangular(1, 2), horizon=0.5, dt=0.05)
    theta = {"omega": jnp.zeros(2), "kappa": jnp.ones(1), "chi": jnp.zeros(2)}
    with pytest.raises(TypeError, match=r"Fused is an estimator.*task\.simulator\(\), theta, obj"):
        evaluate(task.estimator("cpu"), theta, count=4)
    assert evaluate(task.simulator(), theta, count=4, objective=task.objective).trajectories == 4


def test_unstable_steps_are_warned_about_before_the_run():
    task = tcmt.transmission(tcmt.rectangular(3, 3), horizon=0.2, dt=0.01)
    theta = {"kappa": 6 * jnp.ones(12)}
    estimator = task.estimator("cpu")
    with pytest.warns(RuntimeWarning, match=r"Euler steps of 0.01 are unstable.*Use dt ≤"):
        estimator(KEY, theta, 4)


# ------------------------------------------------------------------------------------ command line


def invoke(*arguments):
    return CliRunner().invoke(
        app,
        [
            "estimate",
            "paper",
            "--set",
            "lattice.rows=2",
            "--set",
            "lattice.columns=3",
            "--set",
            "task.horizon=0.2",
            "--trajectories",
            "40",
            *arguments,
        ],
    )


def test_estimate_of_a_network_as_json(tmp_path):
    network = tcmt.rectangular(2, 3)
    theta = {"omega": np.full(6, 0.1), "kappa": np.linspace(0.5, 1.5, 7), "chi": np.zeros(6)}
    np.savez(tmp_path / "theta.npz", **theta)
    outputs = {}
    for backend in ("cpu", "jax"):
        done = invoke(
            "--params", str(tmp_path / "theta.npz"), "--set", f"backend={backend}", "--json"
        )
        assert done.exit_code == 0, done.output
        outputs[backend] = json.loads(done.output)
    report = outputs["cpu"]
    assert (
        report["bonds"]
        == network.bonds.tolist()
        == [[0, 1], [0, 3], [1, 2], [1, 4], [2, 5], [3, 4], [4, 5]]
    )
    assert set(report) == {
        "J",
        "J_stderr",
        "trajectories",
        "bonds",
        "gradient",
        "stderr",
        "seconds",
    }
    for part in ("gradient", "stderr"):
        for name, size in (("omega", 6), ("kappa", 7), ("chi", 6)):
            assert len(report[part][name]) == size
            reference = np.array(outputs["jax"][part][name])
            np.testing.assert_allclose(
                report[part][name], reference, atol=1e-4 * np.abs(reference).max()
            )


def test_estimate_of_a_network_for_people():
    done = invoke()
    assert done.exit_code == 0
    assert "2x3 lattice: 6 resonators, 7 bonds" in done.output
    assert "J = " in done.output
    assert f"s on the {resolve_backend('auto')} backend, time baseline" in done.output


def test_estimate_of_a_network_says_what_is_wrong():
    for arguments, message in [
        (["--set", "lattice.rows=0"], "lattice.rows"),
        (["--score", "euler"], "--score: for recordings"),
        (["--baseline", "median"], "no baseline 'median'"),
        (["--set", "task.dt=0.03"], "whole number of steps"),
        (["--trajectories", "1"], "at least 2; got 1"),
        (["--set", "task.sigma_w=0"], "task.sigma_w"),
        (["--params", "nowhere.npz"], "there is no file nowhere.npz"),
    ]:
        done = invoke(*arguments)
        assert done.exit_code == 2
        assert message in done.output


def test_estimate_of_a_network_refuses_parameters_of_another_lattice(tmp_path):
    np.savez(tmp_path / "theta.npz", kappa=np.ones(5))
    done = invoke("--params", str(tmp_path / "theta.npz"))
    assert done.exit_code == 2
    assert "`kappa` must have shape (7,) for this lattice; got (5,)" in done.output
