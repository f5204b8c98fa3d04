"""Responses in time of a particle driven round a ring: coverage of their errors, and their strides.

χ(t) of ⟨sin x⟩ to the amplitude of the potential, dx = (f + A sin x)dt + √(2D)dW, from records in
which nothing is changed, against the exact response of the Euler chain (tests/support/ring.py).

    python benchmarks/response_cover.py cover
    python benchmarks/response_cover.py strides
"""

import argparse
import sys
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from machine import describe_machine

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))
import fluctua as fl
import ring

TRUTH = {"torque": 1.0, "amplitude": 1.5, "D": 0.5}
DT = 0.02
LAGS = 50
TURN = 2 * np.pi
FILTER = 0.12
"""Share of the sample before in a tracked position: increments correlate by 0.13."""


def make_noise(theta, x):
    return jnp.sqrt(2 * theta["D"]) * jnp.ones(1)


def sine(theta, x):
    return jnp.sin(x[0])


BASIS = fl.response.fourier(3)
SINE = fl.Process(lambda th, x: th["torque"] + th["amplitude"] * jnp.sin(x), make_noise)
FOURIER = fl.Process(
    lambda th, x: th["torque"] + th["amplitude"] * (th["force"] @ BASIS(x)[1:])[None], make_noise
)
KNOWN = {name: jnp.array(value) for name, value in TRUTH.items()}
START = {
    "torque": jnp.array(0.0),
    "amplitude": jnp.array(1.0),
    "force": jnp.zeros(6).at[1].set(1.0),
    "D": jnp.array(1.0),
}
UNKNOWN = fl.response.CrossFitted(("torque", "force", "D"))


def respond(process, theta, record, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        options = {"window": LAGS * DT, "period": TURN, **options}
        return fl.response.step_response(process, sine, theta, record, **options)


def fit_same_data(record):
    """The drift of a fit to all of the record, taken for known."""
    fitted = respond(FOURIER, START, record, calibration=UNKNOWN)
    return respond(FOURIER, fitted.theta, record)


METHODS = {
    "drift and D known": lambda record: respond(SINE, KNOWN, record),
    "torque, amplitude, D fitted in folds": lambda record: respond(
        SINE, KNOWN, record, calibration=fl.response.CrossFitted(("torque", "amplitude", "D"))
    ),
    "Fourier drift and D fitted in folds": lambda record: respond(
        FOURIER, START, record, calibration=UNKNOWN
    ),
    "the same, Fourier baseline": lambda record: respond(
        FOURIER, START, record, calibration=UNKNOWN, baseline=BASIS
    ),
    "Fourier drift and D, fit taken for known": fit_same_data,
}


def measure_cover(repeats):
    """Errors, coverage and bias of every method over so many records."""
    exact = ring.exact_response(*TRUTH.values(), DT, LAGS)[:, 1]
    at = [5, LAGS]
    print(f"{repeats} records of 12 × 3000 samples, 12 × {3000 * DT:g} units of time")
    print("| method | error at t = 0.1 and 1 | scatter/error | interval | band | bias |")
    for name, method in METHODS.items():
        off, error, inside, together = [], [], [], []
        for seed in range(repeats):
            x = ring.simulate(TRUTH, DT, 3000, 12, seed)
            answer = method(fl.Trajectories(DT * np.arange(3001), x))
            truth = exact * (TRUTH["amplitude"] if "Fourier" in name or "same" in name else 1)
            chi = answer.response["amplitude"]
            low, high = (side["amplitude"] for side in answer.interval)
            inside.append(((low <= truth) & (truth <= high))[at])
            low, high = (side["amplitude"] for side in answer.band)
            together.append(np.all((low <= truth) & (truth <= high)))
            off.append((chi - truth)[at] / truth.max())
            error.append(answer.stderr["amplitude"][at] / truth.max())
        error = np.sqrt(np.mean(np.square(error), axis=0))
        scatter = np.std(off, axis=0)
        bias = np.mean(off, axis=0) / scatter * np.sqrt(repeats)
        cells = [error, scatter / error, np.mean(inside, axis=0)]
        pairs = [f"{a:.3f}, {b:.3f}" for a, b in cells]
        ends = f"{np.mean(together):.2f} | {bias[0]:+.1f}, {bias[1]:+.1f}"
        print(f"| {name} | {' | '.join(pairs)} | {ends} |", flush=True)


def measure_strides(strides):
    """The response by stride where a filter has been over the positions."""
    x = np.unwrap(ring.simulate(TRUTH, DT, 10_000, 39, 7), axis=1)
    tracked = (1 - FILTER) * x[:, 1:] + FILTER * x[:, :-1]
    increments = np.diff(tracked[..., 0], axis=1)
    centred = increments - increments.mean()
    correlation = np.mean(centred[:, 1:] * centred[:, :-1]) / centred.var()
    exact = TRUTH["amplitude"] * ring.exact_response(*TRUTH.values(), DT, LAGS)[:, 1]
    print(f"39 × 10,000 samples; neighbouring increments correlate by {correlation:.2f}")
    print("| positions | stride | D | force[1] | χ(0.16) | χ(0.8) |")
    for label, path in (("as they are", x[:, 1:]), ("filtered", tracked)):
        record = fl.Trajectories(DT * np.arange(path.shape[1]), path % TURN)
        for stride in strides:
            answer = respond(FOURIER, START, record, calibration=UNKNOWN, stride=stride)
            rows = [round(t / (stride * DT)) for t in (0.16, 0.8)]
            chi, error = (tree["amplitude"][rows] for tree in (answer.response, answer.stderr))
            D = f"{float(answer.theta['D']):.4f} ± {float(answer.theta_stderr['D']):.4f}"
            force = answer.theta["force"][1]
            ends = [f"{c:.4f} ± {e:.4f}" for c, e in zip(chi, error, strict=True)]
            print(f"| {label} | {stride} | {D} | {force:.3f} | {' | '.join(ends)} |", flush=True)
    print(f"| exact | | 0.5 | 1.5 | {exact[8]:.4f} | {exact[40]:.4f} |")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("cover", "strides"))
    parser.add_argument("--repeats", type=int, default=80)
    arguments = parser.parse_args()
    jax.config.update("jax_enable_x64", True)
    print(describe_machine("cpu"))
    if arguments.what == "cover":
        measure_cover(arguments.repeats)
    else:
        measure_strides((1, 2, 4, 8))
