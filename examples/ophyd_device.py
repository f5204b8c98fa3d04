"""ophyd device
============

Under Bluesky: two positioners are the knobs, a triggered array is the record.

Run it with `python examples/ophyd_device.py`, or train it into a folder:
`fluctua insitu train FILE:connect --model FILE:model --out FOLDER`; this file is FILE.
"""

import tempfile
from pathlib import Path

import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
from bluesky import FailedStatus, RunEngine, plan_stubs
from ophyd import Component, Device, SoftPositioner, sim
from scipy.signal import lfilter

import fluctua as fl
from fluctua import insitu

RNG, T, NOISE = np.random.default_rng(0), np.linspace(0.0, 4.0, 401), 0.1


class Resonator(Device):  # stands for the hardware; its resonance is hidden
    drive = Component(SoftPositioner, egu="V", limits=(0.0, 3.0), init_pos=0.0)
    detuning = Component(SoftPositioner, egu="MHz", limits=(-2.0, 2.0), init_pos=0.0)
    trace = Component(sim.SynSignal)

    def simulate(self):  # complex (times,), from rest
        rate = 1.0 + 1j * (0.7 + self.detuning.position)
        kicks = NOISE * np.sqrt(T[1]) * RNG.normal(size=(T.size, 2)) @ np.array([1, 1j])
        return lfilter([0.0, 1.0], [1.0, rate * T[1] - 1.0], self.drive.position * T[1] + kicks)


def connect():
    device = Resonator(name="resonator")
    device.trace.sim_set_func(device.simulate)
    knobs = {"drive": device.drive, "detuning": device.detuning}
    engine = RunEngine(context_managers=[])  # signals stay with the training

    def acquire():  # one trajectory per call
        engine(plan_stubs.trigger(device.trace, wait=True))
        return device.trace.get()

    return insitu.instrument.make_driver(
        set=lambda settings: [engine(plan_stubs.mv(knobs[k], v)) for k, v in settings.items()],
        acquire=acquire,
        t=T,
        limits={name: knob.limits for name, knob in knobs.items()},
        units={name: knob.egu for name, knob in knobs.items()},
        health=lambda: {name: knob.position for name, knob in knobs.items()},
        transient=(FailedStatus,),
        close=device.destroy,
    )


def drift(settings, x, t, unknowns):
    detuning = settings["detuning"] + unknowns["resonance"]
    return jnp.array([-x[0] + detuning * x[1] + settings["drive"], -x[1] - detuning * x[0]])


process = fl.Process(drift, lambda settings, x: NOISE * jnp.ones(2))
goal = fl.Objective(running=lambda settings, x: -((x[0] - 1.0) ** 2 + x[1] ** 2) / T[-1])
knobs = {"drive": insitu.Knob(0.5, (0.0, 3.0)), "detuning": insitu.Knob(0.0, (-2.0, 2.0))}
unknowns = {"resonance": insitu.Unknown(0.0, spread=0.5)}
model = insitu.Model(process, goal, knobs, unknowns, x0=jnp.zeros(2), t=T)

# %%
# A short training on the simulated hardware, and records at its first and its last settings.

if __name__ == "__main__":
    plan = insitu.Plan(iterations=20, trajectories=2, learning_rate=0.2, calibration="training")
    with tempfile.TemporaryDirectory() as folder:
        rows = list(insitu.run(connect, model, plan, Path(folder, "run")))
    for row, _ in rows[::5]:
        print(f"iteration {row.iteration:2d}   J = {row.J:.3f}")
    figure, axes = plt.subplots(figsize=(7, 2.8), layout="constrained")
    driver = connect()
    for name, theta in (("before", rows[0][1].theta), ("after", rows[-1][1].next_theta)):
        settings = {knob: float(value) for knob, value in theta.items()}
        print(f"{name}: " + ", ".join(f"{knob} {value:.2f}" for knob, value in settings.items()))
        driver.set(settings)
        driver.arm(10)
        real, imaginary = np.moveaxis(driver.acquire().x, -1, 0)
        axes.plot(real.T, imaginary.T, "C0" if name == "before" else "C1", lw=0.5)
        axes.plot([], [], "C0" if name == "before" else "C1", label=name)
    driver.close()
    axes.plot(1, 0, "kx", label="wanted")
    axes.set(xlabel="real part", ylabel="imaginary part", aspect="equal")
    axes.legend(frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))
    plt.show()
