"""NESTbench25 without its checkout: works and gradients against exact answers, files, engines."""

import subprocess

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import nestbench
import nestbench_active
import nestbench_erasure
import nestbench_traps
from nestbench_protocols import ROWS, find_row, follow_engine, read_protocol, write_protocol

ENGINE = """#!/bin/sh
case "$*" in *-h*) echo "-s <n_samples>" >&2; exit 0;; esac
echo "order parameter = 7.5 ± 0.1, n_samples = 1" > report_answer.dat
echo "order parameter = 2.5e-03 ± 0.1, n_samples = 2" >> report_answer.dat
"""


def z_scores(estimate, exact):
    """(estimate − exact) / standard error of every component."""
    pairs = zip(*map(jax.tree.leaves, (estimate.gradient, exact, estimate.stderr)), strict=True)
    return np.concatenate(
        [np.ravel((np.asarray(g) - np.asarray(e)) / np.asarray(s)) for g, e, s in pairs]
    )


def simulate_engine(trap, protocol, rng, count):
    """Work of `count` trajectories by the loop of the engine, in numpy. Shape (count,)."""
    scale = 1.0 if trap.damping is None else nestbench_traps.OMEGA
    rows = follow_engine(trap.dt / scale, trap.duration / scale, trap.duration / scale / ROWS)
    x, v = rng.normal(size=(2, count))
    work = np.zeros(count)
    centre = nestbench_traps.BEGIN
    for row in rows:
        switched = protocol[row, 0]
        work += ((x - switched) ** 2 - (x - centre) ** 2) / 2
        centre = switched
        z = rng.normal(size=count)
        if trap.damping is None:
            x = x + (centre - x) * trap.dt + np.sqrt(2 * trap.dt) * z
        else:
            left = 1 - trap.damping
            force = -nestbench_traps.QUALITY * (x - centre)
            x, v = x + v * trap.dt, left * v + trap.damping * force + np.sqrt(1 - left**2) * z
    return work + ((x - nestbench_traps.END) ** 2 - (x - centre) ** 2) / 2


def work_and_gradient(trap, theta):
    """The exact work of a trap and its gradient, by one compiled program."""
    work = lambda theta: nestbench_traps.exact_work(trap, theta)
    return jax.jit(jax.value_and_grad(work))(theta)


def find_work(trap, theta):
    """The exact work of a trap alone."""
    return float(jax.jit(lambda theta: nestbench_traps.exact_work(trap, theta))(theta))


class TestTraps:
    def test_optimum_of_the_overdamped_trap_is_that_of_continuous_time(self):
        trap = nestbench_traps.overdamped()
        best = {"knots": jnp.linspace(5 / 3, 10 / 3, 9)}
        # steps of 10⁻³ and rows that begin with them are of first order, like the difference
        work, gradient = work_and_gradient(trap, best)
        assert float(work) == pytest.approx(25 / 3, rel=1e-3)
        assert np.abs(gradient["knots"]).max() < 1e-3

    @pytest.mark.parametrize(
        "name", [pytest.param("overdamped", marks=pytest.mark.long), "underdamped"]
    )
    def test_gradient_of_the_work_is_exact(self, name):
        trap = getattr(nestbench_traps, name)()
        trap = trap._replace(dt=trap.dt * (1 if name == "overdamped" else 20))
        theta = jax.tree.map(lambda leaf: leaf + 0.3, trap.theta)
        estimate = nestbench_traps.make_estimator(trap, "jax")(jax.random.key(1), theta, 200)
        work, gradient = work_and_gradient(trap, theta)
        exact = {name: -np.asarray(leaf) for name, leaf in gradient.items()}
        assert np.abs(z_scores(estimate, exact)).max() < 4
        off = float(estimate.value) + float(work)
        assert abs(off) < 4 * float(estimate.value_stderr)

    @pytest.mark.parametrize("midpoint", [False, True])
    def test_work_of_the_engines_loop(self, midpoint):
        trap = nestbench_traps.overdamped()
        if midpoint:
            trap = nestbench_traps.underdamped(midpoint=False)
            trap = trap._replace(theta={**trap.theta, "kicks": jnp.array([2.0, -1.0])})
        work = simulate_engine(trap, trap.tabulate(trap.theta), np.random.default_rng(0), 400)
        error = work.std(ddof=1) / 20
        assert abs(work.mean() - find_work(trap, trap.theta)) < 4 * error

    def test_both_sums_of_a_file_are_those_of_the_chain(self):
        works = []
        for midpoint in (False, True):
            trap = nestbench_traps.underdamped(kick_rows=5, midpoint=midpoint)
            theta = {**trap.theta, "kicks": jnp.array([4.0, -4.0])}
            works.append(find_work(trap, theta))
        sums = nestbench_traps.compare_sums(trap.tabulate(theta))
        # single precision over 13,762 steps, and what noise adds
        np.testing.assert_allclose(sums, works, atol=5e-3)
        assert sums.midpoint > sums.engine + 0.1

    def test_engines_sum_falls_below_the_bound_with_short_kicks(self):
        kicked = {"knots": jnp.linspace(0.54, 4.46, 3), "kicks": jnp.array([4.256, -4.256])}
        bound = 25 / (2 + 7 * 0.3 * np.pi)
        works = [
            find_work(nestbench_traps.underdamped(kick_rows=1, midpoint=midpoint), kicked)
            for midpoint in (False, True)
        ]
        assert works[0] < 0.7 * bound
        assert bound < works[1] < 1.01 * bound


class TestActiveParticle:
    def exact(self, theta, target, steps):
        """−Δ − 10⁻³⟨W⟩ without swimming: the positions stay Gaussian."""
        t = jnp.linspace(0.0, nestbench_active.DURATION, steps + 1)
        dt = t[1]
        stiffness = jax.vmap(lambda t: nestbench_active.control(theta, "stiffness", t))(t)
        variance = 1 / nestbench_active.STIFFNESS
        work = (stiffness[0] - nestbench_active.STIFFNESS) * variance

        def step(variance, pair):
            now, after = pair
            variance = variance * (1 - now * dt) ** 2 + 2 * dt
            return variance, (after - now) * variance

        variance, works = jax.lax.scan(step, variance, (stiffness[:-1], stiffness[1:]))
        work = work + jnp.sum(works)
        work = work + (nestbench_active.STIFFNESS - stiffness[-1]) * variance
        edges = nestbench_active.INNERMOST + nestbench_active.WIDTH * jnp.arange(len(target) + 1)
        below = jnp.exp(-(edges**2) / (2 * variance))
        density = (below[:-1] - below[1:]) / nestbench_active.WIDTH
        off = jnp.mean((density - target) ** 2)
        return -off - nestbench_active.WORK_WEIGHT * work

    def test_gradient_of_the_histogram_is_exact(self):
        steps = 40
        theta = {"stiffness": jnp.array([5.0, 3.0, 6.0]), "swim": jnp.zeros(3)}
        target = np.exp(-(np.linspace(0.0, 3.7, 75) ** 2))
        simulator = nestbench_active.make_simulator(steps, "jax")
        estimator = nestbench_active.HistogramEstimator(target, simulator)
        estimate = estimator(jax.random.key(0), theta, 4000)
        exact = jax.jit(jax.value_and_grad(lambda theta: self.exact(theta, target, steps)))
        value, gradient = exact(theta)
        assert np.abs(z_scores(estimate, gradient)).max() < 4
        off = float(estimate.value) - float(value)
        assert abs(off) < 4 * float(estimate.value_stderr)

    def test_step_solves_the_model_within_bounds(self):
        rng = np.random.default_rng(0)
        model = nestbench_active.Model(
            1e-3 * rng.normal(size=9), rng.normal(size=(9, 4)), np.zeros(4)
        )
        free = nestbench_active.find_step(np.zeros(4), model, [np.full(4, -9.0), np.full(4, 9.0)])
        expected = np.linalg.lstsq(model.slopes, model.missing, rcond=None)[0]
        np.testing.assert_allclose(free, expected, atol=1e-6)
        at_bound = nestbench_active.find_step(np.zeros(4), model, [np.zeros(4), np.full(4, 9.0)])
        assert (at_bound > -2e-6).all()

    def test_target_with_other_bins_is_refused(self, tmp_path):
        path = tmp_path / "target.dat"
        path.write_text("0.1 0.5\n0.2 0.6\n")
        with pytest.raises(ValueError, match="first bins"):
            nestbench_active.read_target(path)


class TestErasure:
    def test_gradient_is_exact_in_one_well(self):
        """Far from the divide the force is linear, and the energy needs two moments alone."""
        steps = 60
        theta = {"divide": jnp.full(3, 1e3), "distance": jnp.array([1.0, -2.0, 4.0])}
        process = nestbench_erasure.make_process(steps)
        dt = nestbench_erasure.DURATION / steps

        def exact(theta):
            mean = jnp.zeros(2)
            spread = jnp.diag(jnp.array([1 + nestbench_erasure.WELL**2, 1.0]))
            noise = jnp.diag(process.noise(theta, mean) ** 2 * dt)

            def advance(x, t):
                return x + process.drift(theta, x, t) * dt

            def step(moments, t):
                mean, spread = moments
                slope = jax.jacobian(advance)(mean, t)
                return (advance(mean, t), slope @ spread @ slope.T + noise), None

            (mean, spread), _ = jax.lax.scan(step, (mean, spread), jnp.arange(steps) * dt)
            return -nestbench_erasure.find_energy(mean) - jnp.trace(spread) / 2

        estimator = nestbench_erasure.make_estimator(nestbench_erasure.ENERGY, steps, "jax")
        estimate = estimator(jax.random.key(0), theta, 500)
        value, gradient = jax.jit(jax.value_and_grad(exact))(theta)
        off = float(estimate.value) - float(value)
        assert abs(off) < 4 * float(estimate.value_stderr)
        slope, error = estimate.gradient["distance"], estimate.stderr["distance"]
        off = (np.asarray(slope) - np.asarray(gradient["distance"])) / np.asarray(error)
        assert np.abs(off).max() < 4
        assert np.abs(estimate.gradient["divide"]).max() == 0


class TestFiles:
    def test_a_protocol_is_read_as_it_was_written(self, tmp_path):
        protocol = np.random.default_rng(0).normal(size=(ROWS, 2)) * 1e3
        write_protocol(tmp_path / "p.dat", protocol)
        lines = (tmp_path / "p.dat").read_text().splitlines()
        assert len(lines) == ROWS
        assert {len(line.split()) for line in lines} == {2}
        np.testing.assert_allclose(read_protocol(tmp_path / "p.dat"), protocol, rtol=1e-8)

    def test_a_protocol_that_is_not_finite_is_refused(self, tmp_path):
        with pytest.raises(ValueError, match="nan"):
            write_protocol(tmp_path / "p.dat", np.full((ROWS, 1), np.nan))

    def test_rows_are_those_of_the_engine_but_for_rounding(self):
        trap = nestbench_traps.underdamped()
        omega = nestbench_traps.OMEGA
        engine = follow_engine(0.01, trap.duration / omega, trap.duration / omega / ROWS)
        t = np.asarray(trap.t[:-1])
        rows = np.asarray(jax.vmap(lambda t: find_row(t, trap.dt, trap.duration / ROWS))(t))
        assert len(rows) == len(engine)
        late = rows - engine
        assert set(np.unique(late)) <= {0, 1}
        # rows that begin with a step, and those that begin within 0.02 of a step after one
        assert late.sum() <= ROWS / 109 + 0.02 * ROWS + 3 * np.sqrt(0.02 * ROWS)

    def test_committed_protocols_are_complete(self):
        for name, problem in nestbench.PROBLEMS.items():
            for seed in range(3):
                protocol = read_protocol(nestbench.RESULTS / f"{name}_seed{seed}.dat")
                assert protocol.shape == (ROWS, len(problem.controls))


class TestEngine:
    def test_answers_of_all_engines_are_read(self):
        several = "order parameter = 1.5 ± 0, n_samples = 1\norder parameter = 8.3 ± 0.1, n\n"
        assert nestbench.parse_answer(several) == 8.3
        active = " order parameter = -0.0029, Delta = 4e-05, mean_work = -2.9, mean_heat = 5\n"
        assert nestbench.parse_answer(active) == -0.0029
        with pytest.raises(ValueError, match="no order parameter"):
            nestbench.parse_answer("nothing")

    def test_runs_are_one_sample_each(self, tmp_path, monkeypatch):
        engine = tmp_path / "engine"
        engine.mkdir()
        (engine / "sim").write_text(ENGINE)
        (engine / "sim").chmod(0o755)
        monkeypatch.setattr(nestbench, "BETWEEN_RUNS", 0.0)
        commands = []
        run = subprocess.run

        def record(command, **options):
            commands.append(command)
            return run(command, **options)

        monkeypatch.setattr(subprocess, "run", record)
        assert nestbench.run_engine(engine, None, 10, 2) == [2.5e-3, 2.5e-3]
        assert commands[1:] == [["./sim", "-n", "10", "-s", "1"]] * 2

    def test_a_folder_that_is_no_checkout_is_refused(self, tmp_path):
        with pytest.raises(FileNotFoundError, match="protocol-benchmarks/NESTbench25"):
            nestbench.build_engine(tmp_path, "abp", tmp_path)

    def test_a_row_of_the_table_replaces_the_one_before(self, tmp_path):
        path = tmp_path / "scores.csv"
        for value in (1, 2):
            rows = [{"problem": "abp", "protocol": "seed0", "value": value}]
            nestbench.update_table(path, rows, ("problem", "protocol"))
        assert path.read_text() == "problem,protocol,value\nabp,seed0,2\n"


@pytest.mark.long
@pytest.mark.parametrize("name", ["trap_overdamped", "trap_underdamped", "erasure", "abp"])
def test_a_short_training_gives_a_protocol(name, monkeypatch):
    # 13,762 steps take JAX 8 s; exact answers are compared with them above
    trap = nestbench_traps.underdamped()
    coarse = trap._replace(dt=20 * trap.dt)
    monkeypatch.setattr(nestbench_traps, "underdamped", lambda: coarse)
    options = {"target": np.exp(-(np.linspace(0.0, 3.7, 75) ** 2))} if name == "abp" else {}
    result = nestbench.PROBLEMS[name].train(0, quick=True, **options)
    assert result["protocol"].shape == (ROWS, len(nestbench.PROBLEMS[name].controls))
    assert np.isfinite(result["protocol"]).all()
    assert result["trajectories"] > 0
    assert len(result["history"]) > 0
