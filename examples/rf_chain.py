r"""RF chain
========

Five resonators that are read at their two ends: the inner three are tuned blindly.

A wave enters at the first resonator and leaves at the last. In the frame of the drive::

    dψ_k/dt = −(γ_k + iδ_k) ψ_k − iκ (ψ_{k−1} + ψ_{k+1}) + drive + noise,

with a tuning voltage for the detuning δ of each of the three inner resonators, δ = offset +
voltage. Their offsets are unknown, and their amplitudes are not read. Run it with one of::

    python examples/rf_chain.py
    fluctua insitu train examples/rf_chain.py:connect --model examples/rf_chain.py:model \
        --out runs/chain --calibration training --trajectories 4 --iterations 25 \
        --set learning_rate=0.2
"""

import argparse
import tempfile
from pathlib import Path
from typing import NamedTuple

import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
from scipy.linalg import expm
from scipy.optimize import minimize

import fluctua as fl
from fluctua import insitu

SITES, COUPLING, LOSS, LEAD = 5, 1.0, 0.05, 0.8  # rates in 1/µs
NOISE, READOUT = 0.05, 0.02
T = np.linspace(0.0, 12.0, 121)  # µs
LOSSES = np.full(SITES, LOSS) + LEAD * np.eye(SITES)[[0, -1]].sum(axis=0)
NEIGHBOURS = np.eye(SITES, k=1) + np.eye(SITES, k=-1)
DRIVE = np.sqrt(2 * LEAD) * np.eye(SITES)[0]  # of a wave with power one
PORTS = (0, SITES - 1)


# --8<-- the model
def drift(settings, x, t, unknowns):
    """Rate of change of the state [Re ψ, Im ψ] of all resonators. Shape (10,)."""
    psi = x[:SITES] + 1j * x[SITES:]
    inner = settings["tuning"] + unknowns["offset"]
    detuning = jnp.concatenate([jnp.zeros(1), inner, jnp.zeros(1)])
    rate = -(LOSSES + 1j * detuning) * psi - 1j * COUPLING * NEIGHBOURS @ psi + DRIVE
    return jnp.concatenate([rate.real, rate.imag])


def reward(settings, y):
    """Power that leaves at the last resonator, averaged. y = [Re ψ₀, Re ψ₄, Im ψ₀, Im ψ₄]."""
    return 2 * LEAD * (y[1] ** 2 + y[3] ** 2) / T[-1]


model = insitu.Model(
    process=fl.Observed(
        fl.Process(drift, noise=lambda settings, x: NOISE * jnp.ones(2 * SITES)),
        observe=np.eye(2 * SITES)[[0, 4, 5, 9]],
        noise=READOUT**2,
        start=np.zeros(2 * SITES),
        transition=fl.scores.local_linear,
    ),
    objective=fl.Objective(running=reward),
    knobs={"tuning": insitu.Knob(np.zeros(3), bounds=(-3.0, 3.0))},
    unknowns={"offset": insitu.Unknown(np.zeros(3), spread=1.0)},
    x0=jnp.zeros(2 * SITES),
    t=T,
)
# --8<-- the model


class Chain:
    """Stands for the hardware: exact transitions from sample to sample, and hidden offsets."""

    offset = np.array([0.9, -1.2, 0.7])
    rng = np.random.default_rng(0)  # of the class: noise goes on after a new connection

    def __init__(self):
        self.settings = {}

    def acquire(self, count):
        """Amplitudes at both ends (count, times, 2), complex, with readout noise."""
        law = find_transition(self.settings["tuning"] + self.offset)
        root = np.linalg.cholesky(law.covariance)
        psi = np.zeros((count, SITES), complex)
        record = [psi]
        for _ in T[1:]:
            psi = psi @ law.step.T + law.shift + self.draw(count, SITES) @ root.T
            record.append(psi)
        ends = np.stack(record, axis=1)[:, :, PORTS]
        return ends + READOUT * self.draw(count, T.size, 2)

    def draw(self, *shape):
        return self.rng.normal(size=shape) + 1j * self.rng.normal(size=shape)


class Transition(NamedTuple):
    """Law of ψ after one sampling interval: step·ψ + shift, and the covariance of its noise.

    covariance: of each quadrature.
    """

    step: np.ndarray
    shift: np.ndarray
    covariance: np.ndarray


def find_transition(detuning):
    """The transition of a chain whose inner resonators have such detunings (3,)."""
    outer = np.zeros(1)
    rate = -np.diag(LOSSES + 1j * np.concatenate([outer, detuning, outer]))
    rate = rate - 1j * COUPLING * NEIGHBOURS
    noise = NOISE**2 * np.eye(SITES)
    block = expm(np.block([[rate, noise], [np.zeros_like(noise), -rate.conj().T]]) * T[1])
    step = block[:SITES, :SITES]
    shift = np.linalg.solve(rate, (step - np.eye(SITES)) @ DRIVE)
    return Transition(step, shift, block[:SITES, SITES:] @ step.conj().T)


def compute_return(detuning):
    """J of a chain with such detunings: mean and covariance, sample by sample."""
    law = find_transition(detuning)
    mean = np.zeros(SITES, complex)
    covariance = np.zeros((SITES, SITES), complex)
    power = []
    for _ in T:
        noise = 2 * (covariance[-1, -1].real + READOUT**2)
        power.append(2 * LEAD * (abs(mean[-1]) ** 2 + noise))
        mean = law.step @ mean + law.shift
        covariance = law.step @ covariance @ law.step.conj().T + law.covariance
    return np.trapezoid(power, T) / T[-1]


# --8<-- the driver
def connect():
    """Open the instrument; called again after every failure."""
    box = Chain()
    return insitu.instrument.make_driver(
        box.settings.update,
        box.acquire,
        t=T,
        channels=("Re in", "Re out", "Im in", "Im out"),
        limits={"tuning": (-4.0, 4.0)},
        units={"tuning": "V"},
        health=lambda: box.settings,
    )


# --8<-- the driver


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--iterations", type=int, default=25, help="of four trajectories each")
    iterations = parser.parse_args().iterations
    plan = insitu.Plan(iterations, trajectories=4, learning_rate=0.2, calibration="training")
    with tempfile.TemporaryDirectory() as folder:
        rows = list(insitu.run(connect, model, plan, Path(folder, "run")))
        calibration = Path(folder, "run", "calibration.txt").read_text()
    for row, _ in (*rows[::5], rows[-1]):
        print(f"iteration {row.iteration:2d}   J = {row.J:.3f}")
    print(calibration.strip())
    last, record = rows[-1]
    best = minimize(lambda v: -compute_return(v), -Chain.offset).x - Chain.offset
    designs = {
        "before": np.zeros(3),
        f"after {last.trajectories} trajectories": np.asarray(record.next_theta["tuning"]),
        "best by the hidden offsets": best,
    }
    print(f"{'':<28}{'tuning':>20}{'J of the device':>18}")
    figure, axes = plt.subplots(figsize=(7, 2.8), layout="constrained")
    axes.plot([row.trajectories for row, _ in rows], [row.J for row, _ in rows], "k.", ms=4)
    for k, (name, tuning) in enumerate(designs.items()):
        values = "".join(f"{v:7.2f}" for v in tuning)
        J = compute_return(tuning + Chain.offset)
        print(f"{name:<28}{values:>20}{J:18.4f}")
        axes.axhline(J, color=f"C{k}", lw=1, label=name)
    axes.set(xlabel="measured trajectories", ylabel="power at the output, J")
    axes.legend(frameon=False, loc="center right")
    plt.show()
