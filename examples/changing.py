"""A device that changes while it is trained: the calibration notices, forgets, and the training
goes on.

A particle in a trap is pushed to hold at x = 1. Nobody knows the stiffness of the trap or its
offset, and after 20 iterations the offset jumps. Run it with `python examples/changing.py`.
"""

import tempfile

import jax.numpy as jnp
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
    """An instrument in a laboratory; here a simulation that alone knows when it changes."""

    measured = 0

    def __call__(self, key, theta, count):
        hidden = before if self.measured < JUMP else after
        self.measured += 1
        return simulator(key, effective(theta, hidden), count)


if __name__ == "__main__":
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

        def show(row, record):
            if row.event or row.iteration in (JUMP - 1, JUMP, JUMP + 10, JUMP + 19):
                print(
                    f"  {row.iteration:>3}  push {float(record.theta):6.3f}  J = {row.J:.3f}  "
                    f"{row.event}"
                )

        with tempfile.TemporaryDirectory() as folder:
            fl.run(
                fl.Training(estimator, jnp.array(0.0), optax.adam(0.1), trajectories=4),
                iterations=40,
                folder=f"{folder}/run",
                on_row=show,
            )
