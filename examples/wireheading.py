"""Wireheading
===========

A training that inflates its return by amplified noise, and the guard against it.

The paper warns of training a noise channel: a growing γ_e amplifies the noise at the output port,
which the return cannot tell from transmitted power, "driving it above unity". Here a 3 × 3 network
of noisy resonators is trained twice, its frequencies and the couplings γ_e of its leads together,
with the score of Eq. 21. Once for the bare return: it passes unity, while less and less of the
drive arrives. Once with guard="dark", which subtracts the power that comes out when the drive is
off.

Run it with `python examples/wireheading.py`; the gallery ran
`python examples/wireheading.py --iterations 50 --count 500`.
"""

import argparse
from typing import Any, NamedTuple

import jax
import matplotlib.pyplot as plt
import numpy as np
import optax
from matplotlib import rc_context
from matplotlib.figure import Figure
from rich.progress import track

import fluctua as fl
from fluctua import tcmt

SMALL_TEXT: Any = {"font.size": 7, "legend.frameon": False}
SETTING: Any = {"horizon": 10.0, "dt": 1e-2}
NETWORK = tcmt.rectangular(3, 3, gamma=0.08, sigma_w=2.0)
BARE, GUARDED = (
    tcmt.transmission(NETWORK, **SETTING),
    tcmt.transmission(NETWORK, guard="dark", **SETTING),
)
BOUNDS = ({"omega": -0.3, "gamma_e": 0.2}, {"omega": 0.3, "gamma_e": 8.0})


class Course(NamedTuple):
    """One training. claimed: the return it was trained for. measured: by a power meter.
    transmitted: without noise.
    """

    claimed: np.ndarray
    measured: np.ndarray
    transmitted: np.ndarray
    gamma_e: np.ndarray


def train(task: tcmt.Task, iterations: int, count: int) -> Course:
    theta = tcmt.initial_parameters(jax.random.key(0), NETWORK, train=("omega", "gamma_e"))
    records = fl.train(
        fl.Training(
            task.estimator("cpu"), theta, optax.adam(0.1), trajectories=count, bounds=BOUNDS, seed=1
        ),
        iterations=iterations,
    )
    quiet = tcmt.with_noise(BARE, sigma_w=0.0)
    rows = [
        (
            float(r.estimate.value),
            tcmt.exact.value(BARE, r.theta),
            tcmt.exact.value(quiet, r.theta),
            r.theta["gamma_e"],
        )
        for r in track(records, "Training", total=iterations, transient=True)
    ]
    return Course(*(np.array(column) for column in zip(*rows, strict=True)))


def draw(bare: Course, guarded: Course) -> Figure:
    with rc_context(SMALL_TEXT):
        figure, (a, b, c) = plt.subplots(1, 3, figsize=(7.0, 2.4), layout="constrained")
        for axes, course, title in ((a, bare, "bare return"), (b, guarded, "dark run subtracted")):
            iteration = 1 + np.arange(len(course.measured))
            axes.plot(
                iteration, course.measured, color="#d55e00", lw=2.6, label="power at the output"
            )
            axes.plot(
                iteration, course.transmitted, color="#117733", lw=2.6, label="of it transmitted"
            )
            axes.plot(iteration, course.claimed, color="black", lw=0.7, label="return as estimated")
            axes.axhline(1, color="0.45", lw=0.8, ls=(0, (4, 2)))
            axes.set(xlabel="iteration", title=title)
        top = 1.45 * max(course.measured.max() for course in (bare, guarded))
        for axes in (a, b):
            axes.set_ylim(0, top)
        a.set_ylabel("fraction of the drive's power")
        a.legend(loc="upper left")
        for course, colour, name in ((bare, "#d55e00", "bare"), (guarded, "#117733", "guarded")):
            c.plot(
                iteration,
                course.gamma_e[:, 0],
                color=colour,
                lw=0.8,
                ls=(0, (3, 1.5)),
                label=f"{name}, input",
            )
            c.plot(iteration, course.gamma_e[:, 1], color=colour, label=f"{name}, output")
        c.set(
            xlabel="iteration",
            ylabel=r"coupling of the lead $\gamma_e$",
            ylim=(0, 1.5 * bare.gamma_e.max()),
        )
        c.legend(loc="upper left", ncols=2, columnspacing=0.8, handlelength=1.0, handletextpad=0.4)
        for axes, name in zip((a, b, c), "abc", strict=True):
            axes.set_title(name, loc="left", fontweight="bold")
        return figure


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--plot", metavar="FILE", help="save the picture instead of showing it")
    parser.add_argument("--iterations", type=int, default=100)
    parser.add_argument("--count", type=int, default=2000, help="trajectories per iteration")
    options = parser.parse_args()
    courses = []
    for name, task in (("the bare return", BARE), ("the guarded return", GUARDED)):
        print(f"Training {name}.")
        courses.append(train(task, options.iterations, options.count))
    for name, course in zip(("bare", "guarded"), courses, strict=True):
        print(
            f"{name:<8} power at the output {course.measured[0]:.3f} -> {course.measured[-1]:.3f}, "
            "of it transmitted "
            f"{course.transmitted[0]:.3f} -> {course.transmitted[-1]:.3f}"
        )
    figure = draw(*courses)
    if options.plot:
        figure.savefig(options.plot, dpi=130)
    else:
        plt.show()
