"""Unknown device
==============

A device that differs from its settings, calibrated and trained with the same few trajectories.

A damped pendulum in a noisy bath is pushed to come to rest at an angle of one radian. Its three
pushes have unknown gains, and stiffness and friction are not those of the data sheet. Run it with
`python examples/unknown.py`.
"""

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax

import fluctua as fl

TIMES = jnp.linspace(0, 3, 301)


def drift(p, x, t):
    angle, speed = x
    force = jnp.sum(p["push"] * jnp.exp(-((t - jnp.arange(3.0)) ** 2)))
    return jnp.array([speed, force - p["stiffness"] * jnp.sin(angle) - p["friction"] * speed])


def effective(theta, phi):
    """What the pendulum does when the pushes are set to θ."""
    return {"push": phi["gain"] * theta, "stiffness": phi["stiffness"], "friction": phi["friction"]}


process = fl.Process(drift, noise=lambda p, x: jnp.array([0.0, 0.1]))
rest = fl.Objective(terminal=lambda p, x: -((x[0] - 1) ** 2) - x[1] ** 2)
simulator = fl.simulator(process, start=jnp.zeros(2), t=TIMES)
model = fl.ppgt(simulator, rest, baseline=fl.Twin())

data_sheet = {"gain": jnp.ones(3), "stiffness": jnp.array(2.0), "friction": jnp.array(0.5)}
hidden = {
    "gain": jnp.array([0.7, 1.2, 0.9]),
    "stiffness": jnp.array(2.5),
    "friction": jnp.array(0.4),
}


def device(key, theta, count):
    """An instrument in a laboratory; here a simulation with hidden errors."""
    return simulator(key, effective(theta, hidden), count)


if __name__ == "__main__":
    estimator, theta = (
        fl.SelfCalibrating(model, device, effective, data_sheet, spread=0.3, samples=0),
        jnp.zeros(3),
    )
    J = lambda theta: fl.evaluate(device, theta, objective=rest, count=200)
    print(f"before: {J(theta)}")
    *_, record = fl.train(
        fl.Training(estimator, theta, optax.adam(0.1), trajectories=2), iterations=60
    )
    print(
        f"after:  {J(record.next_theta)}; {record.trajectories} trajectories trained and calibrated"
    )
    print(estimator.calibration)
    truth = np.concatenate([np.ravel(hidden[name]) for name in sorted(hidden)])
    print(f"hidden: {', '.join(f'{v:g}' for v in truth)} (friction, gains, stiffness)")

    figure, axes = plt.subplots(figsize=(7, 2.8), layout="constrained")
    pushes = {"before": jnp.zeros(3), "after": record.next_theta}
    for k, (name, push) in enumerate(pushes.items()):
        angles = device(jax.random.key(1), push, 10).x[..., 0]
        axes.plot(TIMES, angles.T, f"C{k}", lw=0.6)
        axes.plot([], [], f"C{k}", label=name)
    axes.axhline(1, color="0.6", lw=0.8, ls=":")
    axes.set(xlabel="time", ylabel="angle of the device")
    axes.legend(frameon=False)
    plt.show()
