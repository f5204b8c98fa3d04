"""Networks that classify data: the output port with most power is the answer to an example.

A trajectory is one example. Its features x are detunings of input sites, or amplitudes of the
drives on them, and are held from t = 0 on. The device starts empty and is read at its output ports:

    ω_n → ω_n + span·x_n   or   s⁺_n → s⁺_n + span·x_n
    answer = argmax_k |s⁻_k|²
    reward = ln softmax(scale · |s⁻_k|² / P)[label],     P the incoming power

J is the mean log-likelihood of the labels over data and noise. Examples are contexts, drawn anew
for every trajectory, so that an ensemble is a minibatch and the gradient is unbiased for all data.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fluctua.core import baselines, check, draws, simulate
from fluctua.core import estimator as estimators
from fluctua.core.arrays import Array, Params, PyTree, jit
from fluctua.core.objective import Objective
from fluctua.core.process import Process
from fluctua.tcmt import coupled_modes, experiment
from fluctua.tcmt import network as networks
from fluctua.tcmt.examples import Examples

Encoding = Literal["detuning", "amplitude"]
"""Quantity of the input sites that carries the features of an example."""


@dataclass(frozen=True)
class InputDrift:
    """Drift of a network whose inputs carry the features of an example.

    drift: of the network with its constant drives.
    sites: input sites.
    features: number of the feature on each of these sites.
    encoding: quantity that carries the features.
    span: detuning or amplitude per unit of a feature.
    """

    drift: coupled_modes.NetworkDrift
    sites: tuple[int, ...]
    features: tuple[int, ...]
    encoding: Encoding
    span: float

    def __call__(self, theta: Params, x: Array, t: Array, context: PyTree) -> Array:
        """Return dψ/dt as quadratures. (2N,)"""
        network = self.drift.network
        values = self.span * context["features"][np.asarray(self.features)].astype(x.dtype)
        sites = np.asarray(self.sites)
        rate = self.drift(theta, x, t, None)
        if self.encoding == "detuning":
            shift = jnp.zeros(network.sites, x.dtype).at[sites].set(values)
            psi = coupled_modes.to_psi(x)
            return rate + coupled_modes.to_x(-1j * shift * psi)
        leads = _find_leads(network, self.sites)
        s_plus = jnp.zeros(network.leads, x.dtype).at[leads].set(values)
        source = coupled_modes.lead_matrix(network, networks.parameters(network, theta)) @ s_plus
        return rate.at[: network.sites].add(source.astype(x.dtype))


@dataclass(frozen=True)
class OutputPowers:
    """Powers |s⁻_k|² at output ports that are not driven, in units of the incoming power. (K,)

    network: the device.
    outputs: leads, one per class.
    incoming: Σ|s⁺|².
    """

    network: networks.Network
    outputs: tuple[int, ...]
    incoming: float

    def __call__(self, theta: Params, x: Array) -> Array:
        """Return the powers at one state. (K,)"""
        ports = list(self.outputs)
        weights = self.network.lead_weights[:, ports]
        gamma_e = networks.parameters(self.network, theta)["gamma_e"][np.asarray(ports)]
        if self.network.local:
            sites = self.network.lead_sites[ports]
            psi = coupled_modes.to_psi(x)[sites] * weights[sites, np.arange(len(ports))]
        else:
            psi = weights.T @ coupled_modes.to_psi(x)
        return 2 * gamma_e * coupled_modes.abs2(psi) / self.incoming


@dataclass(frozen=True)
class LabelLikelihood:
    """ln softmax(scale · powers)[label] at one state."""

    powers: OutputPowers
    scale: float

    def __call__(self, theta: Params, x: Array, context: PyTree) -> Array:
        """Return the log-likelihood of the label."""
        logits = self.scale * self.powers(theta, x)
        return jax.nn.log_softmax(logits)[context["label"]].astype(x.dtype)


@dataclass(frozen=True)
class WindowLikelihood:
    """Reward rate: the log-likelihood of the label at times of the window, over its length.

    A lower bound of the log-likelihood of the mean powers, since ln softmax is concave.
    """

    likelihood: LabelLikelihood
    begin: float
    length: float

    def __call__(self, theta: Params, x: Array, t: Array, context: PyTree) -> Array:
        """Return the rate."""
        # half a step of float32 early: the first time of the window is in it
        inside = t >= self.begin - 1e-4 * self.length
        return jnp.where(inside, self.likelihood(theta, x, context) / self.length, 0)


class Answers(NamedTuple):
    """Powers at the output ports, for each repetition and example.

    powers: (R, D, K), the fraction of the incoming power at each port.
    labels: (D,).
    """

    powers: np.ndarray
    labels: np.ndarray

    @property
    def single_shot(self) -> float:
        """Fraction of right answers of single trajectories."""
        return float(np.mean(self.powers.argmax(axis=2) == self.labels))

    @property
    def averaged(self) -> float:
        """Fraction of right answers by the mean power of all repetitions."""
        return float(np.mean(self.powers.mean(axis=0).argmax(axis=1) == self.labels))


class Classification(NamedTuple):
    """A network that classifies; made by `classification`.

    network: the device.
    process: with examples as contexts.
    objective: the log-likelihood of the label.
    t: the time grid (T+1,); the start is zero.
    powers: (theta, x) -> powers at the output ports.
    window: time before the end in which powers are averaged; 0 for the last state alone.

    >>> network = tcmt.layered([2, 4, 2])
    >>> task = tcmt.classification(network, inputs=[0, 1], outputs=[2, 3])
    >>> examples = tcmt.Examples(np.array([[0.0, 1.0], [1.0, 0.0]]), [0, 1])
    >>> answers = task.answer(key, tcmt.initial_parameters(key, network), examples)
    """

    network: networks.Network
    process: Process
    objective: Objective
    t: np.ndarray
    powers: OutputPowers
    window: float

    @property
    def start(self) -> Array:
        """The start state: empty resonators. (2N,)"""
        return jnp.zeros(2 * self.network.sites)

    def simulator(self, examples: Any, wiener: draws.Wiener = draws.philox) -> simulate.Simulator:
        """Return the simulator. examples: `Examples`, or any key -> context like theirs."""
        if isinstance(examples, Examples):
            self._check_examples(examples)
        return simulate.simulator(self.process, self.start, self.t, context=examples, wiener=wiener)

    def estimator(
        self,
        examples: Any,
        baseline: baselines.Baseline | baselines.Twin | str | None = None,
        wiener: draws.Wiener = draws.philox,
    ) -> estimators.PPGT:
        """Return an estimator (key, theta, count) -> Estimate; a minibatch is `count` examples.

        baseline: a `Twin` if not given.
        """
        plan = baselines.Twin() if baseline is None else baseline
        return estimators.ppgt(self.simulator(examples, wiener), self.objective, baseline=plan)

    def answer(
        self, key: Array, theta: Params, examples: Examples, repetitions: int = 1
    ) -> Answers:
        """Run each example `repetitions` times, with its own noise and without jitter."""
        if repetitions < 1:
            raise ValueError(f"`repetitions` must be at least 1; got {repetitions}.")
        self._check_examples(examples)
        readout = _Readout(
            check.process(self.process), self.powers, draws.philox, self._first_reading
        )
        features = jnp.asarray(examples.features, jnp.result_type(float))
        powers = [
            np.asarray(_read_powers(readout, k, theta, check.grid(self.t), features))
            for k in jax.random.split(key, repetitions)
        ]
        return Answers(np.stack(powers), examples.labels)

    def _check_examples(self, examples: Examples) -> None:
        assert isinstance(self.process.drift, InputDrift)  # as `classification` makes it
        features = max(self.process.drift.features) + 1
        classes = len(self.powers.outputs)
        if examples.features.shape[1] != features:
            raise ValueError(
                f"the examples have {examples.features.shape[1]} features, and `inputs` of the "
                f"task names sites for {features}."
            )
        if examples.labels.max() >= classes:
            raise ValueError(
                f"a label is {examples.labels.max()}, but the task has {classes} output ports, "
                f"for the labels 0…{classes - 1}."
            )

    @property
    def _first_reading(self) -> int:
        """Index of the first time at which powers count."""
        return int(np.searchsorted(self.t, self.t[-1] - self.window * (1 + 1e-6)))


def classification(
    network: networks.Network,
    inputs: Sequence[int | Sequence[int]],
    outputs: Sequence[int],
    *,
    drive: coupled_modes.Drive | Sequence[coupled_modes.Drive] | None = None,
    encoding: Encoding = "detuning",
    span: float = 1.0,
    scale: float = 100.0,
    window: float = 0.0,
    times: ReadoutTimes | None = None,
) -> Classification:
    """Return the task of classification: the mean log-likelihood of labels.

        J = E[ln softmax(scale · |s⁻_k|² / P)[label]]

    Args:
        network: the device.
        inputs: sites that the features of an example are set on, in their order. A feature may be
            set on several sites: [(0, 1), (2, 3)].
        outputs: leads that are read, one per class; none of them is driven.
        drive: one or several constant drives; on the leads of all input sites with amplitude 10 if
            not given. P is their power; with encoding="amplitude" and no drive it is span² per
            input.
        encoding: "detuning": features times `span` are added to the detunings of the inputs;
            "amplitude": to the amplitudes of their drives.
        span: detuning or amplitude per unit of a feature.
        scale: of the softmax, logits per fraction of the incoming power.
        window: time before the end over which the log-likelihood is averaged; 0 takes the state at
            the end.
        times: horizon, time step and integrator, `ReadoutTimes()` if not given.

    Returns: the task; `estimator(examples)` trains it, `answer(key, theta, examples)` uses it.

    >>> network = tcmt.layered([2, 4, 2])
    >>> task = tcmt.classification(network, inputs=[0, 1], outputs=[2, 3], span=3.0)
    >>> examples = tcmt.Examples(np.array([[0.0, 1.0], [1.0, 0.0]]), [0, 1])
    >>> theta = tcmt.initial_parameters(key, network)
    >>> training = fl.Training(task.estimator(examples), theta, optax.adam(0.02), trajectories=200)
    """
    times = ReadoutTimes() if times is None else times
    _check_encoding(encoding)
    groups = [np.atleast_1d(group).tolist() for group in inputs]
    numbered = [(site, j) for j, group in enumerate(groups) for site in group]
    sites = _check_indices("inputs", [site for site, _ in numbered], network.sites, "resonators")
    features = tuple(j for _, j in numbered)
    ports = _check_indices("outputs", outputs, network.leads, "leads")
    for name, value in (("span", span), ("scale", scale)):
        experiment.check_positive(**{name: value})
    if not 0 <= window <= times.horizon:
        raise ValueError(f"`window` must be between 0 and the horizon; got {window!r}.")
    drives = _find_drives(network, sites, drive, encoding)
    driven = {d.lead for d in drives}
    if encoding == "amplitude":
        driven |= set(_find_leads(network, sites).tolist())
    both = sorted(driven & set(ports))
    if both:
        raise ValueError(
            f"an output port must not be driven; lead {both[0]} is in `outputs` and is driven."
        )
    power = sum(d.amplitude**2 for d in drives) or span**2 * len(sites)
    base = coupled_modes.process(network, drives, integrator=times.integrator)
    assert isinstance(base.drift, coupled_modes.NetworkDrift)
    drift = InputDrift(base.drift, sites, features, encoding, float(span))
    likelihood = LabelLikelihood(OutputPowers(network, ports, float(power)), float(scale))
    objective = Objective(terminal=likelihood)
    if window:
        rate = WindowLikelihood(likelihood, times.horizon - window, float(window))
        objective = experiment.make_objective(rate, times.integrator)
    return Classification(
        network,
        base._replace(drift=drift),
        objective,
        experiment.make_grid(times.horizon, times.dt),
        likelihood.powers,
        float(window),
    )


class ReadoutTimes(NamedTuple):
    """Time of the answer of a network, and the steps of its simulation.

    horizon: T, the time of the answer.
    dt: Δt, the time step.
    integrator: "euler", "heun" or "rk4".

    >>> early = tcmt.ReadoutTimes(horizon=2.0, dt=0.05)
    >>> network = tcmt.layered([2, 4, 2])
    >>> task = tcmt.classification(network, inputs=[0, 1], outputs=[2, 3], times=early)
    >>> task.t.shape
    (41,)
    """

    horizon: float = 6.0
    dt: float = 0.1
    integrator: str = "rk4"


class _Readout(NamedTuple):
    """Code that reads powers, without numbers. first: index of the first time that counts."""

    process: Process
    powers: OutputPowers
    wiener: draws.Wiener
    first: int


@partial(jit, static_argnums=0)
def _read_powers(
    readout: _Readout, key: Array, theta: Params, times: PyTree, features: Array
) -> Array:
    """Return the mean powers of one trajectory per example. features (D, F) -> (D, K)"""
    process = readout.process
    draw = readout.wiener.draw
    streams = jax.vmap(lambda j: readout.wiener.stream(key, j))(jnp.arange(len(features)))

    def advance(x: Array, example: Array, stream: PyTree, n: Array, t: Array, dt: Array) -> Array:
        context = {"features": example, "label": 0}
        return simulate.advance_diffusion(process, theta, x, context, stream, draw, n, t, dt)

    def measure(x: Array) -> Array:
        return jax.vmap(lambda state: readout.powers(theta, state))(x)

    def body(carry: _Carry, step: Any) -> tuple[_Carry, None]:
        n, t, dt = step
        x = jax.vmap(advance, in_axes=(0, 0, 0, None, None, None))(
            carry.x, features, streams, n, t, dt
        )
        return _Carry(x, carry.total + (n + 1 >= readout.first) * measure(x)), None

    x = jnp.zeros((len(features), 2 * readout.powers.network.sites), features.dtype)
    start = _Carry(x, (readout.first == 0) * measure(x))
    total = jax.lax.scan(body, start, simulate.enumerate_steps(times))[0].total
    return total / (len(times.t) - readout.first)


class _Carry(NamedTuple):
    """States (D, 2N) and sums of powers (D, K)."""

    x: Array
    total: Array


def _find_drives(
    network: networks.Network, sites: tuple[int, ...], drive: Any, encoding: Encoding
) -> tuple[coupled_modes.Drive, ...]:
    if drive is None:
        if encoding == "amplitude":
            return ()
        return tuple(coupled_modes.Drive(int(lead), 10.0) for lead in _find_leads(network, sites))
    drives = coupled_modes.check_drives(network, drive)
    if any(d.envelope is not None or d.frequency != drives[0].frequency for d in drives):
        raise ValueError(
            "the drives of a classification are constant and have one frequency; leave off "
            "`envelope`, and give all drives the same `frequency`."
        )
    return drives


def _find_leads(network: networks.Network, sites: Sequence[int]) -> np.ndarray:
    """Return the lead of each input site; raise for a site without one."""
    on_site = {int(site): lead for lead, site in reversed([*enumerate(network.lead_sites)])}
    missing = [site for site in sites if site not in on_site]
    if missing:
        raise ValueError(
            f"input site {missing[0]} has no lead to be driven through; give the network a lead "
            "there, or name a `drive`."
        )
    return np.array([on_site[site] for site in sites])


def _check_encoding(encoding: str) -> None:
    if encoding not in ("detuning", "amplitude"):
        raise ValueError(f'`encoding` must be "detuning" or "amplitude"; got {encoding!r}.')


def _check_indices(name: str, indices: Sequence[int], size: int, what: str) -> tuple[int, ...]:
    numbers = tuple(int(index) for index in indices)
    if not numbers or len(set(numbers)) < len(numbers):
        raise ValueError(f"`{name}` must name {what}, each once; got {list(indices)}.")
    outside = [index for index in numbers if not 0 <= index < size]
    if outside:
        raise ValueError(
            f"`{name}` must be among the network's {what} 0…{size - 1}; got {outside[0]}."
        )
    return numbers
