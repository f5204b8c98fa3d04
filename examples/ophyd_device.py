"""An ophyd device under Bluesky: two positioners are the knobs, a triggered array is the record.

Train it: `fluctua insitu train FILE:connect --model FILE:model --out FOLDER`; this file is FILE."""

import jax.numpy as jnp
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
