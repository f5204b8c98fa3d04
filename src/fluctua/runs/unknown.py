"""A lattice with hidden errors, measured state by state, and an estimator that calibrates it.

Every number of the device may be off: gains of couplings, offsets of detunings, losses, lead
couplings, noise amplitudes, Kerr coefficients; couplings across the cells, readout noise, coarse
sampling and an integrator of its own can be added. The errors depend on the run's seed alone. The
estimator knows the structure only.

Three parts: `draw_hidden_errors` draws, `make_true_system` and `Device` are what is measured, and
`EffectiveSettings` is what the model makes of settings and unknowns.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fluctua import tcmt
from fluctua.core.arrays import Array, Params
from fluctua.core.draws import philox_seed
from fluctua.core.simulate import noise_key
from fluctua.core.trajectories import Trajectories
from fluctua.learn.effective import KnobLine
from fluctua.learn.self_calibrating import SelfCalibrating
from fluctua.runs import ports
from fluctua.runs.conditions import has_own_rates, has_own_steps
from fluctua.runs.config import Config
from fluctua.tcmt.conversion import kernel_spec
from fluctua.tcmt.experiment import Experiment
from fluctua.tcmt.kernel.run import run
from fluctua.tcmt.port_twin import REFIT
from fluctua.tcmt.sampled_twin import SampledTwin
from fluctua.tcmt.state_scores import compute_returns as measured_returns

STREAM = 0xDE
"""Separates the draw of the hidden errors from other uses of a seed."""

SPREAD = {
    "gain": "gain_error",
    "offset": "offset_error",
    "loss": "loss_error",
    "lead": "lead_error",
    "noise": "noise_error",
    "readout": "noise_error",
    "kerr": "kerr_error",
    "second": "second_neighbours",
}
"""Unknowns, and the keys that give their standard deviations."""

MIN_SPREAD = 1e-3
"""Spread of an unknown that is fitted though the device has none of it."""

WATCHED_SPREAD = {"kerr": 0.01, "second": 0.1}
"""Spread of what is watched: of errors that would matter, whatever the device has."""

EVERY = 20
"""One of so many steps counts for the information; features change by 1e-3 per step."""


@dataclass(frozen=True)
class Device:
    """A device with hidden errors, simulated on the CPU: (key, theta, count) -> Trajectories.

    Without readout noise its states are those of `task.simulator()(key, hidden(theta), count)`.

    Args:
        task: the true network; its graph may have unknown bonds.
        hidden: θ -> its parameters.
        sample_every: steps between two samples.
        readout: standard deviation of the measurement, on each quadrature of each sample.
    """

    task: Experiment
    hidden: Callable[[Params], Params]
    sample_every: int = 1
    readout: float = 0.0

    def __call__(self, key: Array, theta: Params, count: int) -> Trajectories:
        """Set θ and measure."""
        spec = kernel_spec(self.task, self.hidden(theta))
        measured = run(
            spec, philox_seed(noise_key(key)), count, scores=False, record_every=self.sample_every
        )
        assert measured.trajectories is not None
        psi = measured.trajectories
        x = np.concatenate([psi.real, psi.imag], axis=-1)
        if self.readout:
            noise = jax.random.normal(jax.random.fold_in(key, 1), x.shape)
            x = x + self.readout * np.asarray(noise, x.dtype)
        context = self.task.context
        if context is None:
            return Trajectories(self.task.t[:: self.sample_every], x)
        draws = jax.vmap(lambda j: context.draw(noise_key(key), j))(jnp.arange(count))
        return Trajectories(self.task.t[:: self.sample_every], x, draws)

    def returns(self, theta: Params, trajectories: Trajectories) -> np.ndarray:
        """Returns of measured states at its output, whatever its lead couplings are. Shape (E,)."""
        return measured_returns(
            kernel_spec(self.task, self.hidden(theta)), trajectories.t, trajectories.x
        )


@dataclass(frozen=True, eq=False)
class ExtendedLattice:
    """A lattice with bonds across its cells.

    network: with all bonds.
    near, across: indices of the bonds of either kind.
    """

    network: tcmt.Network
    near: np.ndarray
    across: np.ndarray

    def kappa(self, near: Any, across: Any) -> Any:
        """All couplings in the order of the network's bonds."""
        whole = jnp.zeros(len(self.network.bonds), jnp.asarray(near).dtype)
        return whole.at[self.near].set(near).at[self.across].set(across)


def with_diagonals(network: tcmt.Network, rows: int, columns: int) -> ExtendedLattice:
    """The lattice with a bond from every site to those across its cells."""
    site = np.arange(rows * columns).reshape(rows, columns)
    falling = (site[:-1, :-1], site[1:, 1:])
    rising = (site[:-1, 1:], site[1:, :-1])
    diagonal = np.concatenate(
        [np.stack([a.ravel(), b.ravel()], axis=1) for a, b in (falling, rising)]
    )
    edges = np.concatenate([network.bonds, np.sort(diagonal, axis=1)])
    each = zip(network.lead_sites, network.gamma_e, network.sigma_e, strict=True)
    leads = [tcmt.Lead(int(place), float(rate), float(sigma)) for place, rate, sigma in each]
    richer = tcmt.from_edges(
        edges,
        sites=network.sites,
        leads=leads,
        gamma=network.gamma,
        sigma_r=network.sigma_r,
        positions=network.positions,
    )
    index = {tuple(bond): k for k, bond in enumerate(richer.bonds.tolist())}
    places = np.array([index[tuple(edge)] for edge in edges.tolist()])
    return ExtendedLattice(richer, places[: len(network.bonds)], places[len(network.bonds) :])


def draw_hidden_errors(config: Config, network: tcmt.Network) -> dict[str, np.ndarray]:
    """Draw the errors of the device.

    Returns: gain (B,) about 1; offset (N,), kerr (N,) and second (D,) about 0; logarithms of
    factors about 0: loss (N,) on γ, lead (L,) on γ_e, noise (N,) on the noise amplitude of a site,
    readout () on the readout noise.
    """
    d = config.device
    sites = network.sites
    bonds = len(network.bonds)
    across = 2 * (config.lattice.rows - 1) * (config.lattice.columns - 1)
    rng = np.random.default_rng([STREAM, config.seed])
    z = rng.normal(size=bonds + 2 * sites + across)
    gain, offset, kerr, second = np.split(z, np.cumsum([bonds, sites, sites]))
    return {
        "gain": 1 + d.gain_error * gain,
        "offset": d.offset_error * offset,
        "kerr": d.kerr_error * kerr,
        "second": d.second_neighbours * (1 + d.gain_error * second),
        # after the others, so that a device keeps those when it gets these
        "loss": d.loss_error * rng.normal(size=sites),
        "lead": d.lead_error * rng.normal(size=network.leads),
        "noise": d.noise_error * rng.normal(size=sites),
        "readout": np.asarray(d.noise_error * rng.normal()),
    }


def make_true_system(
    config: Config, network: tcmt.Network, make: Callable[[tcmt.Network], tcmt.Task]
) -> tuple[tcmt.Task, Callable[[Params], Params]]:
    """The task of the true device, and θ -> its parameters.

    Args:
        config: its hidden errors.
        network: as the model has it.
        make: network -> its task, on the time grid of the device.
    """
    errors = draw_hidden_errors(config, network)
    true = network.scale_noise(np.exp(errors["noise"])).replace(
        gamma=network.gamma * np.exp(errors["loss"]),
        gamma_e=network.gamma_e * np.exp(errors["lead"]),
    )
    richer = None
    if config.device.second_neighbours:
        richer = with_diagonals(true, config.lattice.rows, config.lattice.columns)
        true = richer.network

    def parameters(theta: Params) -> Params:
        # NumPy, not JAX: it is what the device does
        kappa = KnobLine(gain=errors["gain"]).set(np.asarray(theta["kappa"], np.float64))
        return {
            "omega": KnobLine(errors["offset"]).set(np.asarray(theta["omega"], np.float64)),
            "kappa": kappa if richer is None else np.asarray(richer.kappa(kappa, errors["second"])),
            "chi": np.asarray(theta["chi"], np.float64) + errors["kerr"],
        }

    return make(true), parameters


@dataclass(frozen=True)
class EffectiveSettings:
    """(θ, φ) -> p of the model. A record, so that equal ones share a compilation.

    richer: the lattice with bonds across its cells, where they are among the unknowns.
    gamma: nominal losses γ, where they are among the unknowns.
    gamma_e: nominal lead couplings γ_e, where they are among the unknowns.
    """

    richer: ExtendedLattice | None = None
    gamma: tuple[float, ...] = ()
    gamma_e: tuple[float, ...] = ()

    def __call__(self, theta: Params, phi: Params) -> Params:
        """The parameters of the model at settings θ and unknowns φ."""
        kappa = KnobLine(gain=phi["gain"]).set(theta["kappa"])
        p = {
            "omega": KnobLine(phi["offset"]).set(theta["omega"]),
            "kappa": kappa if self.richer is None else self.richer.kappa(kappa, phi["second"]),
            "chi": theta["chi"] + phi["kerr"] if "kerr" in phi else theta["chi"],
        }
        if "loss" in phi:
            p["gamma"] = jnp.asarray(self.gamma, phi["loss"].dtype) * jnp.exp(phi["loss"])
        if "lead" in phi:
            p["gamma_e"] = jnp.asarray(self.gamma_e, phi["lead"].dtype) * jnp.exp(phi["lead"])
        return p | {name: phi[name] for name in ("noise", "readout") if name in phi}


def make_self_calibrating(
    config: Config,
    task: tcmt.Task,
    make: Callable[[tcmt.Network], tcmt.Task],
    make_true: Callable[[tcmt.Network], tcmt.Task],
) -> SelfCalibrating:
    """The self-calibrating estimator of a device whose structure is known.

    Args:
        config: of the training.
        task: the model's.
        make: network -> a task of the model.
        make_true: network -> a task of the device.
    """
    c = config.calibration
    d = config.device
    network = task.network
    if config.task.reward != "transmission":
        raise ValueError(
            f'`device` is for `task.reward` = "transmission"; got {config.task.reward!r}.'
        )
    start = list_unknowns(config, network)
    richer = None
    model = task
    if c.second_neighbours != "ignore":
        richer = with_diagonals(network, config.lattice.rows, config.lattice.columns)
        start["second"] = jnp.zeros(len(richer.across))
        model = make(richer.network)
    watch = [
        name
        for name, treatment in (("kerr", c.kerr), ("second", c.second_neighbours))
        if treatment == "watch"
    ]
    true_task, parameters = make_true_system(config, network, make_true)
    readout = d.readout * float(np.exp(draw_hidden_errors(config, network)["readout"]))
    settings = EffectiveSettings(
        richer, tuple(network.gamma.tolist()), tuple(network.gamma_e.tolist())
    )
    parts = ports.EstimatorParts(
        _make_twin(config, task, model, richer),
        Device(true_task, parameters, d.sample_every * d.finer, readout),
        settings,
        start,
    )
    if d.read != "all":
        parts = ports.read_at_ports(config, network, parts)
    return SelfCalibrating(
        *parts,
        {name: _choose_spread(config, name, name in watch) for name in start},
        refit=1.0 if d.read == "all" else REFIT,
        watch=watch,
        forget_after=c.forget_after or np.inf,
        correction=c.correction,
        simulated=c.simulated,
        samples=c.samples,
        measure_every=c.measure_every,
        every=EVERY,
        readout=d.readout if c.readout else 0.0,
        on_doubt="continue",  # what the model leaves out is left out on purpose
    )


def _make_twin(
    config: Config, task: tcmt.Task, model: tcmt.Task, richer: ExtendedLattice | None
) -> Any:
    """The twin, calibrated by the model's own Euler steps where the device shares them.

    Bonds that are only watched are left out of the twin: they stay at zero.
    """
    if not (has_own_rates(config) or has_own_steps(config)):
        return model.estimator(config.backend, baseline="twin")
    if richer is None or config.calibration.second_neighbours == "fit":
        twin: Any = model.estimator(config.backend, baseline="twin")
        return SampledTwin(twin)
    twin = task.estimator(config.backend, baseline="twin")
    return SampledTwin(twin, model, tuple(richer.near.tolist()))


def _choose_spread(config: Config, name: str, watched: bool) -> float:
    """Standard deviation of the prior of a family of unknowns."""
    if watched:
        return WATCHED_SPREAD[name]
    return max(config.calibration.prior * getattr(config.device, SPREAD[name]), MIN_SPREAD)


def list_unknowns(config: Config, network: tcmt.Network) -> dict[str, Any]:
    """The unknowns of the model before anything is measured, but for bonds across the cells."""
    d = config.device
    start = {"gain": jnp.ones(len(network.bonds)), "offset": jnp.zeros(network.sites)}
    if d.loss_error:
        start["loss"] = jnp.zeros(network.sites)
    if d.lead_error:
        start["lead"] = jnp.zeros(network.leads)
    if d.noise_error:
        start["noise"] = jnp.zeros(network.sites)
        if d.readout and config.calibration.readout:
            start["readout"] = jnp.zeros(())
    if config.calibration.kerr != "ignore":
        start["kerr"] = jnp.zeros(network.sites)
    return start
