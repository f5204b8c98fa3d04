"""What calibrating costs on top of a twin call: the device of `unknown`, the paper's lattice.

    python benchmarks/calibration_cost.py [--backend cpu|cuda] [--threads 1] [--trajectories 2]
    python benchmarks/calibration_cost.py --kind digits --trajectories 4  # 4,308 unknowns

Two ratios: what learning from a measurement takes over one call of the model's twin, and what an
iteration that measures takes over one that uses the model alone. Every repetition learns from new
trajectories, which are measured beforehand. Times are the fastest of some repetitions, of the wall
clock; on a machine with other work take `--cpu`, the time of the processor, with `--threads 1`.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import time
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

from fluctua.core.host.threads import limit_blas
from fluctua.runs.build import build
from fluctua.runs.config import apply_changes, find_config

STEPS: dict[str, dict[str, Any]] = {
    "easy": {},
    "hard": {
        "task.integrator": "euler",
        "task.dt": 1e-3,
        "device.sample_every": 20,
        "device.finer": 2,
    },
}
"""Steps of the twin call that is compared with: the paper's, Euler's of 0.001, for both kinds."""


class Cost(NamedTuple):
    """Seconds of the parts of a training that calibrates.

    twin: one call of the model. evidence: of the measured trajectories. learn: evidence, posterior
    and tests. alone: an iteration without a measurement. measuring: one with it.
    """

    twin: float
    evidence: float
    learn: float
    alone: float
    measuring: float


def fastest(clock: Callable[[], float], calls: list[Callable[[], Any]]) -> float:
    """Seconds of the fastest call but the first, which compiles."""
    seconds = []
    for call in calls:
        started = clock()
        call()
        seconds.append(clock() - started)
    return min(seconds[1:])


def measure(
    estimator: Any, theta: Any, trajectories: int, repetitions: int, clock: Callable[[], float]
) -> Cost:
    """Time a self-calibrating estimator, part by part and as a whole."""
    keys = jax.random.split(jax.random.key(0), 2 * repetitions + 2)
    batches = [estimator.device(key, theta, trajectories) for key in keys]
    options = estimator.options
    key = keys[0]

    def run_twin() -> None:
        estimator._gradient_rows(key, theta, estimator.belief.mean, None)

    def collect() -> None:
        given = (theta, estimator.belief.mean, batches[0], options.every, options.readout)
        with limit_blas(estimator.belief.start.size):
            estimator.model.evidence(estimator.at, *given)

    twin = fastest(clock, [run_twin] * (repetitions + 1))
    evidence = fastest(clock, [collect] * (repetitions + 1))
    first, second = batches[: repetitions + 1], batches[repetitions + 1 :]
    learn = fastest(clock, [lambda batch=batch: estimator.learn(theta, batch) for batch in first])
    # an instrument measures: only what follows is timed
    estimator.device = lambda key, theta, count: second.pop()
    alone = []
    measuring = []
    while second:
        measures = estimator._calls % options.measure_every == 0
        started = clock()
        estimator(key, theta, trajectories)
        (measuring if measures else alone).append(clock() - started)
    return Cost(twin, evidence, learn, min(alone[1:]), min(measuring[1:]))


def measure_digits(trajectories: int, repetitions: int, clock: Callable[[], float]) -> None:
    """Time the evidence about all errors of a network that classifies digits; random images."""
    import digits

    rng = np.random.default_rng(0)
    rows = np.column_stack([rng.integers(0, 17, (200, digits.PIXELS)), rng.integers(0, 10, 200)])
    images = digits.make_examples(rows, digits.JITTER)
    task = digits.make_task()
    theta = digits.load_theta(digits.OUT / "theta_0.npz")
    simulator = task.simulator(images)
    split = digits.Split(images, images)
    estimator = digits.make_calibration(task, split, simulator, digits.Calibration(simulated=16))
    settings = digits.apply_errors(theta, digits.draw_errors(0, task.network))
    measured = simulator(jax.random.key(0), settings, trajectories)
    options = estimator.options
    common = (estimator.at, theta, estimator.belief.mean, measured, options.every, 0.0)
    model: Any = estimator.model
    print(f"{estimator.belief.start.size} unknowns, {trajectories} runs")
    for name, call in (("evidence", model.evidence), ("score alone", model.evidence_score)):
        seconds = fastest(clock, [lambda call=call: call(*common)] * (repetitions + 1))
        print(f"{name:12s} {seconds:8.3f} s")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--backend", default="cpu")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--kind", choices=("easy", "hard", "digits"), default="hard")
    parser.add_argument("--trajectories", type=int, default=2)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    clock = time.process_time if given.cpu else time.perf_counter
    if given.kind == "digits":
        measure_digits(given.trajectories, given.repetitions, clock)
        return
    config = apply_changes(
        find_config("unknown"),
        {"backend": given.backend, "device.kind": given.kind, **STEPS[given.kind]},
    )
    parts = build(config)
    estimator: Any = parts.estimator
    if given.threads:
        model = estimator.model
        fused = model.fused if given.kind == "hard" else model
        options = dataclasses.replace(fused.options, threads=given.threads)
        fused = dataclasses.replace(fused, options=options)
        estimator.model = dataclasses.replace(model, fused=fused) if given.kind == "hard" else fused
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # doubts about few trajectories
        cost = measure(estimator, parts.theta, given.trajectories, given.repetitions, clock)
    if given.json:
        print(json.dumps({"kind": given.kind, "backend": given.backend, **cost._asdict()}))
        return
    seldom = config.calibration.measure_every
    simulated = estimator.options.simulated
    more = cost.measuring / cost.alone - 1
    print(f"{given.kind} device, {given.trajectories} measured trajectories")
    print(f"a call of the model's twin, {simulated} simulated trajectories {cost.twin:8.4f} s")
    print(f"evidence of the measured trajectories             {cost.evidence:8.4f} s")
    print(f"learning from them: evidence, posterior and tests {cost.learn:8.4f} s")
    print(f"  of a twin call                                  {cost.learn / cost.twin:8.1%}")
    print(
        f"  of {seldom} twin calls, one of which measures         "
        f"{cost.learn / cost.twin / seldom:8.1%}"
    )
    print(f"an iteration that uses the model alone            {cost.alone:8.4f} s")
    print(f"an iteration that measures                        {cost.measuring:8.4f} s, {more:+.1%}")
    print(f"  over a training, one iteration of {seldom} measures  {more / seldom:+13.1%}")


if __name__ == "__main__":
    main()
