"""Cost of locally linear scores along one long record, with and without readout noise.

Process CPU time of `insitu.estimate_continuing`, compilation included, on a particle in a trap that
is stiffer further out: one state, three parameters. Scores of states of several components are
timed by themselves, per sample and after compilation, the best of five. Nothing is known here that
the estimator does not know.

`python benchmarks/local_linear.py` prints a table; `--samples` sets the length of the record.
`--twin` prints standard errors with readout noise instead, by the baselines "time" and "twin",
Euler's score. The twin knows the model that made the record.
"""

import argparse
import tempfile
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

import fluctua as fl
from fluctua import insitu
from fluctua.core import check
from fluctua.core.scores import CorrectedScore, Step, local_linear_score
from machine import describe_machine

jax.config.update("jax_enable_x64", True)
DT = 0.02
READOUT = 0.03
THETA = {"k": jnp.array(1.0), "c": jnp.array(0.5), "kT": jnp.array(0.6)}
TRAP = fl.Process(
    drift=lambda theta, x: -theta["k"] * x - theta["c"] * x**3,
    noise=lambda theta, x: jnp.sqrt(2 * theta["kT"]) * jnp.ones(1),
)


def measure_positions(samples: int) -> np.ndarray:
    """Positions (samples,) of the particle, by steps of one interval."""
    kicks = np.random.default_rng(0).normal(size=samples + 500) * np.sqrt(2 * 0.6 * DT)
    x = np.zeros(samples + 501)
    for n, kick in enumerate(kicks):
        x[n + 1] = x[n] - (x[n] + 0.5 * x[n] ** 3) * DT + kick
    return x[501:]


def time_records(samples: int) -> None:
    """Print the CPU time of estimates from a record without and with readout noise."""
    x = measure_positions(samples)
    noisy = x + READOUT * np.random.default_rng(1).normal(size=samples)
    model = insitu.files.RecordingModel(
        TRAP, fl.Objective(running=lambda theta, x: x[0] ** 2), THETA
    )
    head = insitu.files.Description(DT * np.arange(samples), ("x",), parameters=THETA)
    with tempfile.TemporaryDirectory() as folder:
        for name, states, variance in (("clean", x, None), ("readout noise", noisy, READOUT**2)):
            path = Path(folder) / f"{name}.nc"
            insitu.files.save(path, head, states[None, :, None])
            with insitu.files.open(path) as recording:
                started = time.process_time()
                insitu.estimate_continuing(
                    recording, model, score="local-linear", observation_noise=variance
                )
                seconds = time.process_time() - started
            print(f"{samples:,} samples, {name}: {seconds:.1f} s of CPU time")


def compare_baselines(samples: int) -> None:
    """Print the gradient with readout noise, without and with a twin."""
    x = measure_positions(samples)
    x = x + READOUT * np.random.default_rng(1).normal(size=samples)
    model = insitu.files.RecordingModel(
        TRAP, fl.Objective(running=lambda theta, x: x[0] ** 2), THETA
    )
    head = insitu.files.Description(DT * np.arange(samples), ("x",), parameters=THETA)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "noisy.nc"
        insitu.files.save(path, head, x[None, :, None])
        with insitu.files.open(path) as recording:
            for baseline in ("time", "twin"):
                answer = insitu.estimate_continuing(
                    recording, model, baseline=baseline, observation_noise=READOUT**2
                )
                print(f"baseline {baseline}\n{answer.continuing}")


def time_score(size: int, corrected: bool, count: int = 1024) -> float:
    """Microseconds of CPU time per sample of a score of so many components."""
    mixing = np.random.default_rng(0).normal(size=(size, size)) * 0.3
    process = check.process(
        fl.Process(
            lambda theta, x: TRAP.drift(theta, x) + jnp.asarray(mixing, x.dtype) @ x,
            lambda theta, x: jnp.sqrt(2 * theta["kT"]) * jnp.ones(size),
        )
    )
    score = CorrectedScore(local_linear_score, (1e-4,) * size) if corrected else local_linear_score
    x = jnp.asarray(np.random.default_rng(1).normal(size=(count + 1, size)))

    @jax.jit
    def evaluate(x):
        def one(x, after):
            step = Step(x, after, jnp.zeros(()), jnp.asarray(0.1), None)
            return ravel_pytree(score(process, THETA, step))[0]

        return jax.vmap(one)(x[:-1], x[1:])

    evaluate(x).block_until_ready()
    times = []
    for _ in range(5):
        started = time.process_time()
        evaluate(x).block_until_ready()
        times.append(time.process_time() - started)
    return min(times) / count * 1e6


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=int, default=349_000)
    parser.add_argument("--twin", action="store_true")
    chosen = parser.parse_args()
    samples = chosen.samples
    print(describe_machine("cpu"))
    if chosen.twin:
        compare_baselines(samples)
        raise SystemExit
    time_records(samples)
    for size, corrected in ((1, False), (1, True), (2, False), (2, True), (4, False)):
        kind = "with readout correction" if corrected else "alone"
        print(f"{size} components, {kind}: {time_score(size, corrected):.2f} µs per sample")
