"""What calibrating costs on top of a twin call: the preset `unknown`, the paper's lattice.

    python benchmarks/calibration_cost.py [--backend cpu|cuda] [--threads 1] [--trajectories 2]

Times are the fastest of some repetitions, of the wall clock; on a machine with other work take
`--cpu`, the time of the processor, with `--threads 1`.
"""

from __future__ import annotations

import argparse
import dataclasses
import time
from collections.abc import Callable
from typing import Any

import jax

from fluctua.runs.build import build
from fluctua.runs.config import apply_changes, find_config


def fastest(clock: Callable[[], float], call: Callable[[], Any], repetitions: int) -> float:
    """Seconds of the fastest call, after one that compiles."""
    call()
    seconds = []
    for _ in range(repetitions):
        begun = clock()
        call()
        seconds.append(clock() - begun)
    return min(seconds)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--backend", default="cpu")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--kind", choices=("easy", "hard"), default="hard")
    parser.add_argument("--trajectories", type=int, default=2)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--cpu", action="store_true")
    given = parser.parse_args()
    config = apply_changes(
        find_config("unknown"), {"backend": given.backend, "device.kind": given.kind}
    )
    parts = build(config)
    estimator: Any = parts.estimator
    if given.threads:
        model = estimator.model
        fused = model.fused if given.kind == "hard" else model
        options = dataclasses.replace(fused.options, threads=given.threads)
        fused = dataclasses.replace(fused, options=options)
        estimator.model = dataclasses.replace(model, fused=fused) if given.kind == "hard" else fused
    theta, key = parts.theta, jax.random.key(0)
    clock = time.process_time if given.cpu else time.perf_counter

    def timed(call):
        return fastest(clock, call, given.repetitions)

    measured = estimator.device(key, theta, given.trajectories)
    u = estimator.belief.mean
    twin = timed(lambda: estimator._gradient_rows(key, theta, u, None))
    options = estimator.options
    evidence = timed(
        lambda: estimator.model.evidence(
            estimator.at, theta, u, measured, options.every, options.readout
        )
    )
    learn = timed(lambda: estimator.learn(theta, measured))
    seldom = config.calibration.measure_every
    print(f"a call of the model, {options.simulated} simulated trajectories   {twin:8.4f} s")
    print(f"evidence of {given.trajectories} measured trajectories            {evidence:8.4f} s")
    print(f"learning from them, evidence and posterior     {learn:8.4f} s")
    print(f"on top of a call, every iteration measures     {learn / twin:8.1%}")
    print(f"on top of a call, one iteration of {seldom} measures  {learn / twin / seldom:8.1%}")


if __name__ == "__main__":
    main()
