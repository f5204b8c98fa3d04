"""Gradients from recordings: in chunks, with hidden channels, with noisy detectors; and what
inspection finds.
"""

import json
import re
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from typer.testing import CliRunner

import fluctua as fl
from fluctua import insitu, tcmt
from fluctua.cli.app import app
from fluctua.insitu.estimating import estimate_model
from fluctua.insitu.hidden import refuse_untrainable
from fluctua.tcmt import exact
from problems import flat, tolerance

PROCESS = fl.Process(
    drift=lambda th, x, t, c: jnp.stack(
        [-th["k"] * x[0] + th["c"] * x[1], -0.7 * x[1] - th["c"] * x[0] + c["force"]]
    ),
    noise=lambda th, x: jnp.array([0.5, 0.8]),
)
OBJECTIVE = fl.Objective(running=lambda th, x: x[0] ** 2, terminal=lambda th, x: x[1] * x[0])
THETA = {"k": jnp.array(0.8), "c": jnp.array(0.6)}
T = np.linspace(0, 2, 21)
HEAD = insitu.files.Description(T, ("a", "b"), context={"force": ()}, parameters=THETA)


@cache
def linear_answer():
    """∂J of the Euler chain from the recursion of its mean and covariance; the force is
    constant, 0.4.
    """

    def value(th):
        a = jnp.array([[-th["k"], th["c"]], [-th["c"], -0.7]])
        f, dt = jnp.eye(2) + a * 0.1, 0.1

        def step(_, now):
            m, p, total = now
            total += (m[0] ** 2 + p[0, 0]) * dt
            return (
                f @ m + jnp.array([0.0, 0.4]) * dt,
                f @ p @ f.T + jnp.diag(jnp.array([0.25, 0.64])) * dt,
                total,
            )

        begin = (jnp.array([1.0, 0.0]), jnp.zeros((2, 2)), jnp.zeros(()))
        m, p, total = jax.lax.fori_loop(0, 20, step, begin)
        return total + m[0] * m[1] + p[0, 1]

    return jax.jit(jax.grad(value))(THETA)


def simulate(key, count):
    run = fl.simulator(
        PROCESS, jnp.array([1.0, 0.0]), T, context=lambda key: {"force": jnp.array(0.4)}
    )
    return run(key, THETA, count)


@pytest.fixture(scope="module")
def recording(tmp_path_factory):
    data = simulate(jax.random.key(8), 2000)
    path = tmp_path_factory.mktemp("r") / "r.nc"
    insitu.files.save(path, HEAD, np.asarray(data.x), {"force": np.asarray(data.context["force"])})
    with insitu.files.open(path) as r:
        yield r


def same(a, b):
    for left, right in zip(jax.tree.leaves(a[:-1]), jax.tree.leaves(b[:-1]), strict=True):
        np.testing.assert_allclose(left, right, rtol=1e-8)
    assert a.count == b.count


@pytest.mark.parametrize(
    ("name", "baseline"), [("none", fl.baselines.none()), ("optimal", fl.baselines.optimal())]
)
def test_chunks_of_a_file_are_the_whole(recording, name, baseline):
    small = 600 * 21 * 2 * 8  # 600 trajectories at a time
    ours = insitu.estimate(recording, PROCESS, OBJECTIVE, baseline=name, chunk_bytes=small).estimate
    same(
        ours,
        fl.gradient(
            PROCESS, OBJECTIVE, THETA, recording.trajectories(load=True), baseline=baseline
        ),
    )


def test_time_baseline_is_unbiased_and_better_than_none(recording):
    exact = flat(linear_answer())
    small = 600 * 21 * 2 * 8
    ours = insitu.estimate(recording, PROCESS, OBJECTIVE, chunk_bytes=small).estimate
    assert np.abs((flat(ours.gradient) - exact) / flat(ours.stderr)).max() < tolerance(2)
    plain = insitu.estimate(recording, PROCESS, OBJECTIVE, baseline="none").estimate
    assert (flat(ours.stderr) < flat(plain.stderr)).all()


# ---------------------------------------------------------------------------------- noisy detectors


@pytest.mark.long
def test_observation_noise_is_corrected_for(key, tmp_path):
    """s² is three times QΔt: a Q from the plain quadratic variation shrinks the gradient to a
    quarter.
    """
    exact, s = flat(linear_answer()), 0.2
    data = simulate(key, 12_000)
    noisy = data._replace(x=data.x + s * jax.random.normal(jax.random.key(1), data.x.shape))
    insitu.files.save(
        tmp_path / "r.nc",
        HEAD,
        np.asarray(noisy.x),
        {name: np.asarray(v) for name, v in noisy.context.items()},
    )
    with insitu.files.open(tmp_path / "r.nc") as r:
        ours = insitu.estimate(r, PROCESS, OBJECTIVE, observation_noise=s**2).estimate
    assert np.abs((flat(ours.gradient) - exact) / flat(ours.stderr)).max() < tolerance(2)
    variation = jnp.array([0.5, 0.8]) ** 2 / 2 + s**2 / 0.1
    naive = fl.gradient(
        PROCESS._replace(noise=lambda th, x: jnp.sqrt(2 * variation)),
        OBJECTIVE,
        THETA,
        noisy,
        baseline=fl.baselines.mean(),
    )
    assert np.abs((flat(naive.gradient) - exact) / flat(naive.stderr)).max() > 10
    plain = fl.gradient(PROCESS, OBJECTIVE, THETA, noisy, baseline=fl.baselines.mean())
    assert np.abs((flat(plain.gradient) - exact) / flat(plain.stderr)).max() > 10


def test_observation_variance_is_checked(recording):
    with pytest.raises(ValueError, match=r"one number ≥ 0, or \(2,\)"):
        insitu.estimate(recording, PROCESS, OBJECTIVE, observation_noise=-1.0)


# ---------------------------------------------------------------------------------- hidden channels

CHAIN = tcmt.chain(5)
TASK = tcmt.transmission(CHAIN, horizon=1.0, dt=0.05)


def test_hidden_site_refuses_its_neighbourhood_by_name():
    theta = tcmt.initial_parameters(jax.random.key(0), CHAIN)
    seen = np.array([1, 2, 3, 4, 6, 7, 8, 9])  # site 0 hidden, both quadratures
    view = insitu.visibility(TASK.process, TASK.objective, theta, seen, 10)
    names = {
        *(f"{family}[{n}]" for family in ("omega", "chi") for n in (0, 1)),
        "kappa[0]",
        "kappa[1]",
    }
    assert set(view.missing) == names
    assert view.missing["omega[1]"] == (0, 5)
    with pytest.raises(
        ValueError, match=r"not trainable .*: kappa\[1\]\. kappa\[1\] needs site 0\."
    ):
        refuse_untrainable(view, ["kappa[1]", "omega[3]"], lambda i: f"site {i % 5}")
    with pytest.raises(ValueError, match="the reward depends on components 4, 9"):
        insitu.visibility(TASK.process, TASK.objective, theta, [0, 1, 2, 3, 5, 6, 7, 8], 10)


@pytest.fixture(scope="module")
def kerr(tmp_path_factory):
    """A folder with recordings of a Kerr network, of all its sites and without site 0."""
    folder = tmp_path_factory.mktemp("kerr")
    theta = tcmt.initial_parameters(jax.random.key(0), CHAIN, chi_std=0.01)
    for name, observe in (("all", None), ("some", [1, 2, 3, 4])):
        head = insitu.files.describe(TASK, theta, observe=observe, seed=4, dtype="complex128")
        assert list(insitu.files.record(folder / name, TASK, head, 12))[-1] == 12
    return folder


@pytest.mark.long
def test_a_filter_gives_what_all_channels_gave_and_the_rest(kerr):
    """Of a Kerr network with site 0 hidden: parameters that do not need it have the score of
    full observation.
    """
    theta = tcmt.initial_parameters(jax.random.key(0), CHAIN, chi_std=0.01)
    results = {}
    for name in ("all", "some"):
        with insitu.files.open(kerr / name) as r:
            results[name] = estimate_model(r, insitu.files.load_model(r), baseline="none")
    whole, part = flat(results["all"].estimate.gradient), flat(results["some"].estimate.gradient)
    view = insitu.visibility(TASK.process, TASK.objective, theta, [1, 2, 3, 4, 6, 7, 8, 9], 10)
    assert view.trainable.sum() == 14 - 6
    np.testing.assert_allclose(part[view.trainable], whole[view.trainable], rtol=1e-6)
    assert np.isfinite(part).all()
    assert np.abs(part - whole)[~view.trainable].max() > 1e-3  # they are not known as well
    assert results["some"].view is None
    assert (results["all"].score, results["some"].score) == ("", "filter")


@pytest.mark.long
def test_hidden_resonators_and_readout_noise_from_the_command_line(tmp_path):
    """Sites 1 and 4 of a chain of five are read, with noise; the answer is that of the
    network's own moments.
    """
    task = tcmt.transmission(CHAIN, horizon=1.0, dt=0.05, drive=tcmt.Drive(0, 3.0), to=1)
    theta = {
        "omega": jnp.array([0.3, -0.2, 0.1, 0.4, 0.0]),
        "kappa": jnp.array([1.0, 0.8, 1.2, 1.0]),
    }
    path = tmp_path / "r.nc"
    head = insitu.files.describe(
        task, theta, observe=[1, 4], seed=4, dtype="complex128", observation_noise=0.2
    )
    assert list(insitu.files.record(path, task, head, 3000))[-1] == 3000
    done = CliRunner().invoke(app, ["estimate", str(path), "--set", "readout_noise=0.2", "--json"])
    assert done.exit_code == 0, done.output
    report = json.loads(done.stdout)
    assert report["score"] == "filter"
    assert report["refused"] == []
    assert np.abs(np.array(report["residuals"]["v"]) - 1).max() < 0.05
    _, answer = exact.value_and_gradient(task, theta)
    z = {
        name: (np.array(report["gradient"][name]) - answer[name]) / report["stderr"][name]
        for name in theta
    }
    assert max(np.abs(v).max() for v in z.values()) < tolerance(9)
    assert (
        np.abs(answer["kappa"]) / report["stderr"]["kappa"]
    ).max() > 5  # and not lost in its error


@pytest.mark.long
def test_stretches_that_do_not_begin_empty_have_no_filter(kerr):
    with insitu.files.open(kerr / "some") as r:
        result = estimate_model(r.cut(5), insitu.files.load_model(r))
        assert "does not begin with empty resonators" in result.score
        names = {f"{family}[{n}]" for family in ("omega", "chi", "kappa") for n in (0, 1)}
        assert set(result.view.missing) == names
        assert np.isnan(flat(result.estimate.gradient)).sum() == 6
        with pytest.raises(ValueError, match="hidden.*does not begin with empty resonators"):
            estimate_model(r.cut(5), insitu.files.load_model(r), observation_noise=1e-6)


# --------------------------------------------------------------------------------------- inspection


def states(count=40, seed=0):
    rng = np.random.default_rng(seed)
    return np.cumsum(rng.normal(size=(count, 50, 3)), axis=1)


def findings(tmp_path, x, t=None):
    path = tmp_path / "r.npz"
    np.savez(path, x=x, t=np.arange(50.0) if t is None else t, **{"parameters.k": 1.0})
    with insitu.files.open(path) as r:
        return insitu.files.inspect(r)


def test_a_sound_recording_has_no_findings(tmp_path):
    assert findings(tmp_path, states()).findings == []


def _nan(x):
    x[3, 7, 1] = np.nan
    return x


def _hold_sample(x):
    x[5, 20] = x[5, 19]
    return x


def _clip(x):
    return np.minimum(x, np.quantile(x, 0.98))


def _drifting(x):
    return x + 0.8 * np.arange(len(x))[:, None, None]


def _dead(x):
    x[:, :, 2] = 0.25
    return x


@pytest.mark.parametrize(
    ("spoil", "what", "text"),
    [
        (_nan, "not finite", "trajectory 3 at time index 7, component 1"),
        (_hold_sample, "dropped samples", "1 sample in 1 of 40 trajectories repeats"),
        (_clip, "clipping", "clipped above"),
        (_drifting, "drift", "between the first and the last 10 trajectories"),
        (_dead, "dead channel", r"x\[2\] never changes"),
    ],
)
def test_what_is_wrong_is_named(tmp_path, spoil, what, text):
    inspection = findings(tmp_path, spoil(states()))
    assert inspection.serious
    texts = {f.what: f.text for f in inspection.findings}
    assert what in texts
    assert re.search(text, texts[what])


def test_time_grids(tmp_path):
    gap = np.r_[0:20, 22:52].astype(float)
    (finding,) = findings(tmp_path, states(), gap).findings
    assert (finding.what, finding.serious) == ("dropped samples", True)
    assert "about 2 samples are missing" in finding.text
    (finding,) = findings(tmp_path, states(), np.arange(50) + 0.1 * np.sin(np.arange(50))).findings
    assert (finding.what, finding.serious) == ("irregular grid", False)


def test_sound_recordings_are_rarely_said_to_drift(tmp_path):
    """200 sound recordings at an alarm rate of 1e-4 each: one false alarm has probability 2 %,
    two 0.02 %.
    """
    alarms = sum(bool(findings(tmp_path, states(24, seed)).findings) for seed in range(200))
    assert alarms <= 1


# ----------------------------------------------------------------------------------------- commands


def test_record_inspect_estimate_from_the_command_line(tmp_path):
    path, run = str(tmp_path / "r.nc"), CliRunner()
    lattice = "--set lattice.rows=1 --set lattice.columns=3 --set task.horizon=1"
    options = ["record", path, *lattice.split(), "--set", "task.dt=0.01", "--every", "2"]
    options += ["--set", "task.sigma_kappa=0.1"]
    first = run.invoke(app, [*options, "--trajectories", "3"])
    assert first.exit_code == 0, first.output
    again = run.invoke(app, [*options, "--trajectories", "8"])
    assert again.exit_code == 2
    assert "exists. Append" in again.output
    assert run.invoke(app, [*options, "--trajectories", "8", "--append"]).exit_code == 0
    other = run.invoke(
        app, [*options, "--trajectories", "9", "--append", "--set", "task.sigma_w=0.4"]
    )
    assert "recorded with another network" in other.output
    whole = str(tmp_path / "w.nc")
    assert (
        run.invoke(app, [*options[:1], whole, *options[2:], "--trajectories", "8"]).exit_code == 0
    )
    with insitu.files.open(path) as a, insitu.files.open(whole) as b:  # interrupted or not
        np.testing.assert_array_equal(a.x[:], b.x[:])
    looked = run.invoke(app, ["inspect", path, "--json"])
    assert looked.exit_code == 0, looked.output
    assert json.loads(looked.output)["trajectories"] == 8
    report = json.loads(run.invoke(app, ["estimate", path, "--json"]).stdout)
    assert len(report["gradient"]["kappa"]) == 2
    assert report["refused"] == []
    assert run.invoke(app, ["estimate", path, "--score", "exact"]).exit_code == 2


def test_inspect_exits_with_1_if_serious(tmp_path):
    np.savez(tmp_path / "r.npz", x=_nan(states()), t=np.arange(50.0))
    done = CliRunner().invoke(app, ["inspect", str(tmp_path / "r.npz")])
    assert done.exit_code == 1
    assert "SERIOUS  not finite" in done.output


def test_estimate_with_a_model_file(tmp_path, recording):
    model = tmp_path / "model.py"
    model.write_text(
        "import fluctua as fl, jax.numpy as jnp\n"
        "process = fl.Process(lambda th, x: -th['k'] * x, lambda th, x: 0.5 * jnp.ones(2))\n"
        "objective = fl.Objective(terminal=lambda th, x: x[0])\n"
        "from fluctua.insitu.files import RecordingModel\n"
        "model = RecordingModel(process, objective)\n"
    )
    done = CliRunner().invoke(
        app, ["estimate", str(recording.path), "--model", f"{model}:model", "--json"]
    )
    assert done.exit_code == 0, done.output
    assert set(json.loads(done.stdout)["gradient"]) == {"k", "c"}
    bare = CliRunner().invoke(app, ["estimate", str(recording.path)])
    assert "--model FILE.py:NAME" in bare.output
    first, again = (insitu.files.load_model(recording, f"{model}:model").process for _ in range(2))
    assert first is again  # what was compiled for one recording serves the next
    model.write_text(model.read_text().replace("0.5", "0.25"))
    assert insitu.files.load_model(recording, f"{model}:model").process is not first
