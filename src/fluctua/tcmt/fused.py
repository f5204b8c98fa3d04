"""A task on the fused kernels: the same estimator protocol, the same noise, a fraction of the time.

The kernels know sites, bonds, drives and ports. Here an `Experiment` and θ become their arrays, and
their columns become the gradient of θ: the chain rule for γ_e and γ, which enter damping,
diffusion, drive and output, and the sum over copies of a network that share one θ.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

from fluctua.core import check
from fluctua.core.arrays import Array, Params, jit, on_host
from fluctua.core.baselines import PILOT, Baseline, Bins, Twin, resolve_baseline
from fluctua.core.check import leading
from fluctua.core.estimate import Estimate, Samples, reduce_samples
from fluctua.core.estimator import ppgt
from fluctua.core.integrators import Substeps
from fluctua.core.likelihood.alternatives import FITTED, Table
from fluctua.core.likelihood.evidence import Evidence, collect_evidence
from fluctua.core.likelihood.guard import TRANSITIONS, Examination, examine_batch
from fluctua.core.likelihood.unknowns import At
from fluctua.core.scores import full_score
from fluctua.core.streamed import estimate_seeds
from fluctua.core.trajectories import Trajectories
from fluctua.core.twin import TwinSamples
from fluctua.learn.natural import blocks_for
from fluctua.tcmt import state_scores
from fluctua.tcmt.coupled_modes import carrier, coefficients, incoming_at
from fluctua.tcmt.experiment import Experiment
from fluctua.tcmt.kernel.cuda import require_cupy
from fluctua.tcmt.kernel.options import (
    Binned,
    KernelOptions,
    KernelSpec,
    check_integrator,
    require_euler,
)
from fluctua.tcmt.kernel.run import Families, KernelResult, run
from fluctua.tcmt.kernel.twin import KernelTwin, TwinResult, expected_lambda, run_twin, twin_options
from fluctua.tcmt.network import parameters
from fluctua.tcmt.time_step import StabilityWatch

KICKS = 300_000
"""Components of residuals that are examined in a call: a few per cent of its time."""

SERVES = ("none", "time", "optimal", "binned", "twin", "carried")
"""Baselines by name (`fluctua.core.baselines`)."""

EVERYONE = 2**32
"""A group of trajectories that no ensemble fills."""

RANK = 16
"""Directions of the quadratic term of a `Twin(order=2)`: plenty for the paper's lattice
(benchmarks/estimators.py).
"""


@dataclass(frozen=True)
class Fused:
    """The estimator made by `fused`: (key, theta, count) -> Estimate."""

    task: Experiment
    baseline: str | np.ndarray | Binned | KernelTwin
    options: KernelOptions
    pilot_count: int = PILOT
    watch: StabilityWatch = field(default_factory=StabilityWatch)

    @cached_property
    def s_plus(self) -> np.ndarray:
        """s⁺ on every lead, (L,) or (T, L): it does not depend on θ, and takes milliseconds
        to tabulate.
        """
        return incoming_table(self.task)

    @cached_property
    def _own(self) -> KernelSpec:
        """The arrays at the network's own parameters."""
        return kernel_spec(self.task, {}, self.s_plus)

    def _spec(self, theta: dict[str, np.ndarray]) -> KernelSpec:
        """The arrays at θ.

        Frequencies, couplings and Kerr shifts enter nothing else: the rest is made once.
        """
        if not theta.keys() <= {"omega", "kappa", "chi"}:
            return kernel_spec(self.task, theta, self.s_plus)
        changed = _repeated(self.task, theta)
        if "omega" in changed:
            changed["omega"] = changed["omega"] + _offset(self.task)
        return self._own.replace(**changed)

    def cost(self, theta: Params) -> int:
        """Trajectories per sample; a pilot comes on top."""
        return 1

    @property
    def pilot(self) -> int:
        """Trajectories that a call runs besides."""
        return self.pilot_count if isinstance(self.baseline, str) and self.baseline == "time" else 0

    @property
    def state(self) -> dict[str, np.ndarray]:
        """Nothing is remembered between calls."""
        return {}

    def restore(self, state: Mapping[str, np.ndarray], theta: Params) -> None:
        """Nothing to put back."""

    def __call__(self, key: Array, theta: Params, count: int) -> Estimate:
        """Estimate ∇θJ from `count` trajectories."""
        return self.with_result(key, theta, count)[0]

    def with_result(
        self, key: Array, theta: Params, count: int, table: np.ndarray | None = None
    ) -> tuple[Estimate, KernelResult | TwinResult]:
        """The estimate, and the kernel's result behind it, which holds a `table` for the
        next: see `next_table`.
        """
        theta = check.parameters(theta, numbers=False)
        combined = chain_rule(self.task, theta)
        result = self.run(key, theta, count, table, samples=combined)
        if combined:
            return reduce_samples(collect_samples(self.task, theta, result)), result
        return _estimate(theta, result), result

    def samples(self, key: Array, theta: Params, count: int) -> Samples:
        """The gradients of the single trajectories."""
        theta = check.parameters(theta, numbers=False)
        return collect_samples(self.task, theta, self.run(key, theta, count, samples=True))

    def split(
        self,
        key: Array,
        theta: Params,
        count: int,
        table: np.ndarray | None = None,
        *,
        first: int = 0,
    ) -> TwinSamples:
        """The two parts of the twin correction; `count` may be 1. first: number of the first
        trajectory.

        >>> parts = task.estimator("cpu", baseline="twin").split(key, theta, 64)
        >>> parts.correction["kappa"].mean(axis=0)  # how wrong the twin is
        """
        if not isinstance(self.baseline, KernelTwin):
            raise ValueError(
                '`split` is of the twin correction: make the estimator with baseline="twin".'
            )
        theta = check.parameters(theta, numbers=False)
        result = self.run(key, theta, count, table, first=first, samples=True)
        assert isinstance(result, TwinResult)
        assert result.direct_samples is not None
        assert result.correction_samples is not None
        direct = per_trajectory(self.task, theta, result.direct_samples)
        correction = per_trajectory(self.task, theta, result.correction_samples)
        return TwinSamples(direct, correction, jnp.asarray(result.returns), result.mean_lambda)

    def scores(self, key: Array, theta: Params, count: int, blocks: int | None = None) -> Array:
        """ΣU over blocks of steps for every trajectory, (B·E, P), for `fluctua.natural`; one run
        more than blocks.

        λ̄ multiplies U and nothing else, so runs of the same noise with λ̄ = 0 and with λ̄ = 1 on a
        block differ by it.
        """
        theta = check.parameters(theta, numbers=False)
        steps = len(self.task.t) - 1
        many = blocks_for(count, ravel_pytree(theta)[0].size, steps, blocks)
        block = np.arange(steps) * many // steps

        def gradients(there: np.ndarray) -> np.ndarray:
            result = self.run(key, theta, count, np.append(0.0, there.astype(float)), samples=True)
            leaves = jax.tree.leaves(collect_samples(self.task, theta, result).gradient)
            return np.concatenate([np.asarray(leaf).reshape(count, -1) for leaf in leaves], axis=1)

        nothing = gradients(block < 0)
        return jnp.asarray(np.concatenate([nothing - gradients(block == b) for b in range(many)]))

    def returns(self, theta: Params, trajectories: Trajectories) -> Array:
        """The return of each measured trajectory. (E,)"""
        return state_scores.returns(
            kernel_spec(self.task, theta, self.s_plus), trajectories.t, trajectories.x
        )

    def evidence(
        self,
        at: At,
        theta: Params,
        u: np.ndarray,
        trajectories: Trajectories,
        every: int = 1,
        readout: float = 0.0,
    ) -> Evidence:
        """Evidence of measured states about unknowns of the network (`core.likelihood`)."""
        p, slope = state_scores.at_point(at, theta, u)
        if (
            self.task.integrator != "euler"
            or self.task.copies > 1
            or not set(p) <= set(state_scores.KNOWN)
        ):
            return collect_evidence(
                self.task.process,
                full_score,
                at,
                theta,
                u,
                trajectories,
                every=every,
                readout=readout,
            )
        spec = kernel_spec(self.task, p, self.s_plus)
        return state_scores.evidence(
            self.task, spec, at, theta, u, trajectories, every, readout, slope
        )

    def recorded(self, theta: Params, trajectories: Trajectories) -> TwinSamples:
        """The two parts of the twin correction on measured states; score and twin are of
        the network at θ.
        """
        is_served = self.task.integrator == "euler" and len(trajectories.t) == len(self.task.t)
        if (
            self.task.copies > 1
            or self.task.modulation
            or not is_served
            or not set(theta) <= set(state_scores.KNOWN)
        ):
            general = ppgt(self.task.simulator(), self.task.objective, baseline=Twin())
            return general.recorded(theta, trajectories, examined=True)
        spec = kernel_spec(self.task, theta, self.s_plus)
        parts = state_scores.recorded(self.task, spec, expected_lambda(spec), trajectories)

        def mine(each):
            return {name: each[name] for name in theta}

        return parts._replace(direct=mine(parts.direct), correction=mine(parts.correction))

    def examine(
        self,
        theta: Params,
        trajectories: Trajectories,
        readout: float,
        earlier: Table | None,
        known_noise: bool = True,
    ) -> Examination:
        """Whether they are those of the network at θ, by the model's own steps from each
        sample to the next.
        """
        process = self.task.process
        stride = state_scores.count_steps(self.task.t[1] - self.task.t[0], trajectories.t)
        if stride > 1 and process.integrator == "euler":
            process = process._replace(integrator=Substeps(stride))
        return examine_batch(
            process,
            theta,
            trajectories,
            readout=readout**2,
            limits=FITTED,
            earlier=earlier,
            start=self.task.start,
            known_noise=known_noise,
            most=max(TRANSITIONS // 20, KICKS // (2 * self.task.network.sites)),
        )

    def run(
        self,
        key: Array,
        theta: Params,
        count: int,
        table: np.ndarray | None = None,
        *,
        first: int | None = None,
        **options: Any,
    ) -> KernelResult | TwinResult:
        """The kernel's own result: returns, and trajectories if `record_every` is given.

        table: (T+1,), in place of the baseline that this estimator was made with; with a twin, in
        place of its λ̄.
        first: number of the first trajectory, where these are a part of an ensemble; a part may be
        of one.
        """
        twin = self.baseline if isinstance(self.baseline, KernelTwin) else None
        check.count(
            count, fewest=1 if first is not None or (twin and options.get("samples")) else 2
        )
        values = check.values(theta)
        self.watch(self.task, values)
        spec = self._spec(values)
        seed, pilot_seed = estimate_seeds(key)
        if options.get("samples"):
            options["rates"] = not {"gamma_e", "gamma"}.isdisjoint(theta)
        chosen = dict(**vars(self.options) | options, first_trajectory=first or 0)
        if twin:
            return self._run_twin(twin, spec, seed, theta, count, table, chosen)
        baseline = self._baseline(spec, pilot_seed) if table is None else table
        return run(spec, seed, count, baseline=baseline, **chosen)

    def pilot_table(self, key: Array, theta: Params) -> np.ndarray | None:
        """λ̄ (T+1,) from the pilot of a time-only baseline; None where no pilot is run."""
        if not self.pilot:
            return None
        values = check.values(check.parameters(theta, numbers=False))
        self.watch(self.task, values)
        table = self._baseline(self._spec(values), estimate_seeds(key)[1])
        assert isinstance(table, np.ndarray)
        return table

    def _run_twin(
        self,
        twin: KernelTwin,
        spec: KernelSpec,
        seed: int,
        theta: Params,
        count: int,
        table: np.ndarray | None,
        options: dict[str, Any],
    ) -> TwinResult:
        model = None
        if twin.theta is not None:
            of_twin = check.parameters(twin.theta(theta), numbers=False)
            model = self._spec(check.values(of_twin))
        return run_twin(
            spec,
            seed,
            count,
            twin=model,
            rank=twin.rank,
            knows_modulation=twin.knows_modulation,
            table=twin.table if table is None else table,
            segment=twin.segment,
            **options,
        )

    def _baseline(self, spec: KernelSpec, seed: int) -> np.ndarray | Binned | None:
        if not isinstance(self.baseline, str):
            assert not isinstance(self.baseline, KernelTwin)
            return self.baseline
        if self.baseline == "time":
            o = self.options
            pilot = KernelOptions(o.backend, o.dtype, o.threads, scores=False, engine=o.engine)
            return run(spec, seed, self.pilot_count, **vars(pilot)).mean_return_to_go
        return None


@dataclass(frozen=True)
class OfLosses:
    """A network's twin for `fluctua.SelfCalibrating`, in p with losses γ: these are found by what
    they do to the drift.

    Their noise is taken as the model has it. A `Fused` also asks the noise, which tells more about
    γ where it is all that moves a sample, and is wrong where samples are far apart or the readout
    has noise of its own.
    """

    fused: Fused

    def split(self, key: Array, theta: Params, count: int) -> TwinSamples:
        """The two parts of simulated trajectories."""
        return self.fused.split(key, theta, count)

    def recorded(self, theta: Params, trajectories: Trajectories) -> TwinSamples:
        """The two parts of measured trajectories."""
        return self.fused.recorded(theta, trajectories)

    def returns(self, theta: Params, trajectories: Trajectories) -> Array:
        """Their returns. (E,)"""
        return self.fused.returns(theta, trajectories)

    def evidence(
        self,
        at: At,
        theta: Params,
        u: np.ndarray,
        trajectories: Trajectories,
        every: int = 1,
        readout: float = 0.0,
    ) -> Evidence:
        """What they say about the unknowns."""
        require_euler(self.fused.task.integrator, "the calibration of losses")
        p, slope = state_scores.at_point(at, theta, u)
        spec = kernel_spec(self.fused.task, p, self.fused.s_plus)
        return state_scores.evidence(
            self.fused.task, spec, at, theta, u, trajectories, every, readout, slope
        )

    def examine(
        self, theta: Params, trajectories: Trajectories, readout: float, earlier: Table | None
    ) -> Examination:
        """Whether they are those of the network at θ, whose noise is not what calibrated
        its losses.
        """
        return self.fused.examine(theta, trajectories, readout, earlier, known_noise=False)


def next_table(result: KernelResult | TwinResult) -> np.ndarray:
    """What a run has measured for the baseline of the next, (T+1,): the mean return-to-go, or
    with a twin that of Λ.
    """
    return result.mean_lambda if isinstance(result, TwinResult) else result.mean_return_to_go


class Carried:
    """An estimator whose time-only baseline is free: the mean return-to-go of the call before (with
    a twin, of Λ).

    Its noise is independent of this call's, so the estimate stays unbiased however far θ has moved;
    a table that is out of date costs variance only. `table` (T+1,) is None before the first call,
    which runs a pilot instead.

    It has a state: put it back to go on where another left off.

    >>> Carried(task.estimator("cpu", baseline="time"))
    """

    def __init__(self, fused: Fused, table: np.ndarray | None = None):
        self.fused = fused
        self.table = table
        self.pilot = 0

    def __call__(self, key: Array, theta: Params, count: int) -> Estimate:
        """Estimate ∇θJ from `count` trajectories."""
        self.pilot = self.fused.pilot if self.table is None else 0
        estimate, result = self.fused.with_result(key, theta, count, self.table)
        self.table = next_table(result)
        return estimate

    def scores(self, key: Array, theta: Params, count: int, blocks: int | None = None) -> Array:
        """ΣU over blocks of steps for every trajectory. (B·E, P)"""
        return self.fused.scores(key, theta, count, blocks)

    def cost(self, theta: Params) -> int:
        """Trajectories per sample."""
        return self.fused.cost(theta)

    @property
    def state(self) -> dict[str, np.ndarray]:
        """All that is remembered; empty before the first call."""
        return {} if self.table is None else {"table": self.table}

    def restore(self, state: Mapping[str, np.ndarray], theta: Params = None) -> None:
        """Put a `state` back. theta: not needed here."""
        self.table = state.get("table")


def fused(
    task: Experiment,
    *,
    device: str,
    baseline: Baseline | Twin | Binned | KernelTwin | np.ndarray | str | None = None,
    **options: Any,
) -> Fused | Carried:
    """An estimator of a task on the "cpu" or "cuda" kernels.

    baseline: a name of `SERVES` or its record. "time" (the default) runs an independent pilot,
    "carried" takes the table of the call before; a table (T+1,) of the mean return-to-go is taken
    as it is. "optimal" is "binned" with one bin; `binned(every=100, group=4096)` is as unbiased as
    the paper's, and faster. "twin" or a `KernelTwin`: the twin correction, in which a digital twin
    of the network says what to expect, at 100 to 3,000 times less variance.
    options: those of `KernelOptions`.

    Where copies of a network share θ, each copy's scores are binned by that copy's own intensities;
    the JAX reference bins by their sum. Both are unbiased.

    >>> fused(task, device="cpu")(jax.random.key(0), theta, 1000)
    """
    if task.weights is None:
        raise ValueError(
            "the fused kernels know rewards that are weighted output powers (`transmission`, "
            "`isolation`); this "
            'task has a reward of its own. Use backend="jax".'
        )
    coefficients(task.simulated, {})  # refuses leads on several resonators, and says what to do
    made, pilot, carries = _served(task, device, baseline)
    _check_integrator(task.integrator, device, made)
    if isinstance(made, KernelTwin) and made.rank > task.simulated.sites:
        raise ValueError(
            f"`rank` is at most the {task.simulated.sites} resonators of the network; got "
            f"{made.rank}."
        )
    estimator = Fused(task, made, _options(device, isinstance(made, KernelTwin), options), pilot)
    return Carried(estimator) if carries else estimator


def _check_integrator(integrator: str, device: str, baseline: Any) -> None:
    """Refuse an integrator that these kernels do not have, before the first call."""
    check_integrator(integrator)
    if isinstance(baseline, Binned):
        require_euler(integrator, "the kernels' binned baseline")
    if isinstance(baseline, KernelTwin) and device == "cuda":
        require_euler(integrator, "the twin on the GPU")


def _served(
    task: Experiment, device: str, baseline: Any
) -> tuple[str | np.ndarray | Binned | KernelTwin, int, bool]:
    """A baseline as the kernels take it, the trajectories of its pilot, and whether it is
    carried on.
    """
    if isinstance(baseline, Binned | KernelTwin):
        return baseline, 0, False
    if isinstance(baseline, np.ndarray | list | jnp.ndarray):
        return _table(task, baseline), 0, False
    plan = resolve_baseline(
        baseline, caller=f"backend={device!r}", serves=SERVES, condition=task.condition
    )
    if isinstance(plan, Twin):
        return _kernel_twin(task, plan), 0, False
    if isinstance(plan.of, Bins):
        if plan.of.condition != leading(task.condition, 4):
            raise ValueError(
                f"backend={device!r} bins by the intensity on each parameter's own sites: leave "
                "out the condition, "
                'binned(bins=...). One of your own runs with backend="jax".'
            )
        return (
            Binned(
                plan.of.bins, plan.of.every, EVERYONE if plan.of.group is None else plan.of.group
            ),
            0,
            False,
        )
    if plan.name == "optimal":
        return Binned(1, len(task.t), EVERYONE), 0, False
    if plan.values is not None:
        return _table(task, plan.values), 0, False
    return "none" if plan.name == "none" else "time", plan.pilot, plan.name == "carried"


def _options(device: str, is_twin: bool, options: dict[str, Any]) -> KernelOptions:
    """KernelOptions of an estimator: what is wrong, or missing on this machine, is said before the
    first call.
    """
    names = [f.name for f in fields(KernelOptions) if f.name not in ("backend", "noise", "scores")]
    unknown = sorted(options.keys() - set(names))
    if unknown:
        raise TypeError(
            f'backend="{device}" has no option {", ".join(unknown)}; it has {", ".join(names)}.'
        )
    made = (
        twin_options(backend=device, **options)
        if is_twin
        else KernelOptions(backend=device, **options)
    )
    if device == "cuda":
        require_cupy()
    return made


def _table(task: Experiment, baseline: Any) -> np.ndarray:
    table = np.asarray(baseline, np.float64)
    if table.shape != task.t.shape:
        raise ValueError(
            f"a table is the mean return-to-go at each time, {task.t.shape}; got {table.shape}."
        )
    if not np.isfinite(table).all():
        raise ValueError("the table of the mean return-to-go holds a value that is not finite.")
    return table


def _kernel_twin(task: Experiment, twin: Twin) -> KernelTwin:
    """What the kernels make of a twin of the library."""
    if twin.process is not None:
        raise ValueError(
            "the kernels' twin is the network itself at parameters of its own: give "
            "`Twin(theta=...)`. A twin with "
            'another `process` runs with backend="jax".'
        )
    if twin.order == 2 and task.modulation is not None:
        raise ValueError(
            "the kernels have the quadratic term for networks without modulation only: use "
            "order=1, which follows each "
            'trajectory\'s modulation, or backend="jax".'
        )
    return KernelTwin(
        theta=twin.theta, rank=min(RANK, task.simulated.sites) if twin.order == 2 else 0
    )


def incoming_table(task: Experiment) -> np.ndarray:
    """s⁺ on every lead at every time that a step asks for, (T, L) or (T+1, L), or (L,) where it
    is constant.
    """
    t = task.t[:-1] if task.integrator == "euler" else task.t
    s_plus = incoming_at(task.drives, task.simulated.leads, t, task.frame)
    return s_plus[0] if np.all(s_plus == s_plus[0]) else s_plus


def kernel_spec(task: Experiment, theta: Params, s_plus: np.ndarray | None = None) -> KernelSpec:
    """The arrays of a task at θ. s_plus: `incoming_table(task)`, if it is at hand."""
    network = task.simulated
    repeated = _repeated(task, theta)
    c = coefficients(network, repeated, offset=_offset(task))
    if s_plus is None:
        s_plus = incoming_table(task)
    weights = np.asarray(task.weights)
    driven = np.array(sorted({drive.lead for drive in task.drives}), int)
    ports = np.flatnonzero(weights)
    return KernelSpec(
        omega=c.omega,
        kappa=c.kappa,
        chi=c.chi,
        bonds=c.bonds,
        damping=c.decay,
        noise=c.amplitude,
        dt=_uniform_step(task.t),
        steps=len(task.t) - 1,
        drive_sites=c.lead_site[driven],
        drive=s_plus[..., driven] * c.lead_coupling[driven],
        port_sites=c.lead_site[ports],
        port_gain=c.lead_coupling[ports],
        port_weight=weights[ports],
        incoming=s_plus[..., ports],
        sigma_kappa=task.modulation.sigma_kappa if task.modulation else 0.0,
        Omega=task.modulation.omega_max / task.modulation.harmonics if task.modulation else 0.1,
        harmonics=task.modulation.harmonics if task.modulation else 10,
        integrator=task.integrator,
    )


def _offset(task: Experiment) -> float:
    """What is added to ω: in the lab frame the carrier."""
    return carrier(task.drives) if task.frame == "lab" else 0.0


def chain_rule(task: Experiment, theta: Params) -> bool:
    """Whether gradients of θ are put together from several columns of the kernels, trajectory
    by trajectory.
    """
    return task.copies > 1 or not {"gamma_e", "gamma"}.isdisjoint(theta)


def per_trajectory(task: Experiment, theta: Params, columns: Families) -> Params:
    """The kernels' columns as gradients of θ, trajectory by trajectory: chain rule, and sum
    over copies.
    """
    of = {"omega": columns.omega, "kappa": columns.kappa, "chi": columns.chi}
    if columns.damping is not None:
        of |= _rates(task, theta, columns)
    return {
        name: jnp.asarray(
            of[name].reshape(len(of[name]), task.copies, -1).sum(axis=1),
            jnp.asarray(theta[name]).dtype,
        )
        for name in theta
    }


def collect_samples(task: Experiment, theta: Params, result: KernelResult | TwinResult) -> Samples:
    """The gradients of θ of the single trajectories, from a run with `samples`."""
    assert result.samples is not None
    return Samples(per_trajectory(task, theta, result.samples), jnp.asarray(result.returns))


def _rates(task: Experiment, theta: Params, columns: Families) -> dict[str, np.ndarray]:
    """∂/∂γ_e and ∂/∂γ from damping Γ, ln Q, the drive f = D s⁺ and the output gain D, with D =
    w√(2γ_e).
    """
    network = task.simulated
    repeated = _repeated(task, theta)
    p = {
        name: np.asarray(value, np.float64) for name, value in parameters(network, repeated).items()
    }
    c = coefficients(network, repeated)
    q = c.amplitude**2 / 2
    damping, log_q, drive, gain = (np.asarray(v) for v in columns[3:])
    gamma = damping + log_q * (network.sigma_r**2 / q)
    site = c.lead_site
    square = network.lead_weights[c.lead_site, np.arange(network.leads)] ** 2
    gamma_e = square * (damping[:, site] + log_q[:, site] * (network.sigma_e**2 / q[site]))
    driven = sorted({d.lead for d in task.drives})
    ports = np.flatnonzero(np.asarray(task.weights))
    gamma_e[:, driven] += drive / (2 * p["gamma_e"][driven])
    gamma_e[:, ports] += gain * c.lead_coupling[ports] / (2 * p["gamma_e"][ports])
    return {"gamma_e": gamma_e, "gamma": gamma}


def _repeated(task: Experiment, theta: Params) -> dict[str, np.ndarray]:
    """θ of all copies."""
    parameters(task.network, theta)  # names and shapes are checked against one device
    values = {name: np.asarray(on_host(value), np.float64) for name, value in theta.items()}
    return (
        values
        if task.copies == 1
        else {name: np.tile(value, task.copies) for name, value in values.items()}
    )


def _uniform_step(t: np.ndarray) -> float:
    return float(t[-1] - t[0]) / (len(t) - 1)


def _estimate(theta: Params, result: KernelResult | TwinResult) -> Estimate:
    """Means and errors as arrays of JAX, by few transfers: each by itself takes as long as a short
    run.

    On the host they are three programs: XLA wakes its threads for one of more than eight arrays,
    and waits for them.
    """
    leaves = tuple((v.size, v.dtype) for v in theta.values())
    wide = functools.reduce(np.promote_types, (dtype for _, dtype in leaves))

    def flat(part):
        return np.concatenate([np.asarray(getattr(part, name), wide) for name in theta])

    parts = [flat(part) for part in (result.gradient, result.stderr, result.second_moment)]
    numbers = (result.value, result.value_stderr)
    if next(iter(theta.values())).devices().pop().platform == "cpu":
        *gradient, value, stderr = _apart(leaves, parts[0], *numbers)
        error, second = (_apart(leaves, part) for part in parts[1:])
    else:
        *arrays, value, stderr = _apart(3 * leaves, np.concatenate(parts), *numbers)
        gradient, error, second = (
            arrays[i : i + len(leaves)] for i in range(0, len(arrays), len(leaves))
        )
    named = [dict(zip(theta, each, strict=True)) for each in (gradient, error, second)]
    return Estimate(named[0], named[1], named[2], value, stderr, len(result.returns))


@functools.partial(jit, static_argnums=0)
def _apart(
    leaves: tuple[tuple[int, np.dtype], ...], flat: Array, *numbers: Array
) -> tuple[Any, ...]:
    """Leaves that stand one after the other, and some numbers as they are."""
    ends = np.cumsum([size for size, _ in leaves])
    each = zip(jnp.split(flat, ends[:-1]), leaves, strict=True)
    return *(part.astype(dtype) for part, (_, dtype) in each), *numbers
