"""Device that changes
===================

A self-calibrating training notices that its device has jumped, forgets, and goes on.

A particle in a trap is pushed to hold at x = 1. The stiffness of the trap and its offset are
unknown, and after 20 iterations the offset jumps. The same training is made twice: once it keeps
all it has measured, once it forgets. Run it with `python examples/changing.py`.
"""

import tempfile
import warnings

import jax.numpy as jnp
import matplotlib.pyplot as plt
import optax

import fluctua as fl

TIMES = jnp.linspace(0, 4, 201)
JUMP = 20


def effective(theta, phi):
    """What the trap does when the push is set to θ."""
    return {"push": theta + phi["offset"], "stiffness": phi["stiffness"]}


process = fl.Process(
    lambda p, x: p["push"] - p["stiffness"] * x, noise=lambda p, x: 0.2 * jnp.ones(1)
)
hold = fl.Objective(running=lambda p, x: -((x[0] - 1) ** 2))
simulator = fl.simulator(process, start=jnp.zeros(1), t=TIMES)
model = fl.ppgt(simulator, hold, baseline=fl.Twin())
nominal = {"offset": jnp.array(0.0), "stiffness": jnp.array(1.0)}
before, after = {"offset": 0.2, "stiffness": 1.3}, {"offset": -0.8, "stiffness": 1.3}


class Device:
    """An instrument in a laboratory; here a simulation that changes at a hidden time."""

    measured = 0

    def __call__(self, key, theta, count):
        hidden = before if self.measured < JUMP else after
        self.measured += 1
        return simulator(key, effective(theta, hidden), count)


if __name__ == "__main__":
    figure, axes = plt.subplots(figsize=(7, 2.8), layout="constrained")
    for forget_after, renew in ((jnp.inf, False), (20, True)):
        estimator = fl.SelfCalibrating(
            model,
            Device(),
            effective,
            nominal,
            spread=0.5,
            samples=0,
            forget_after=forget_after,
            renew=renew,
            on_doubt="continue",  # the first one is shown what becomes of it
        )
        print(f"forget_after={forget_after}, renew={renew}")

        rows: list = []

        def show(row, record, rows=rows):
            rows.append(row)
            if row.event:
                warnings.simplefilter("ignore")  # doubts are shown once
            if row.iteration in (JUMP - 1, JUMP, JUMP + 10, JUMP + 19):
                event = row.event.split(";")[0]  # the rest is doubt in words
                push = float(record.theta)
                print(f"  {row.iteration:>3}  push {push:6.3f}  J = {row.J:.3f}  {event}")

        with tempfile.TemporaryDirectory() as folder:
            fl.run(
                fl.Training(estimator, jnp.array(0.0), optax.adam(0.1), trajectories=4),
                iterations=40,
                folder=f"{folder}/run",
                on_row=show,
            )
        axes.plot([row.iteration for row in rows], [row.J for row in rows], label=f"{renew = }")
    axes.axvline(JUMP, color="0.6", lw=0.8, ls=":")
    axes.set(xlabel="iteration", ylabel="J on the device")
    axes.legend(frameon=False)
    plt.show()
