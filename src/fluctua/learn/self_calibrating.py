"""An estimator that calibrates its model on the trajectories that it rewards: for a device of which
the structure is known and no number is.

A device is set to θ and does something else: a detuning has an offset, a coupling a gain, a loss
was never measured. With these unknowns φ the model's parameters are p(θ, φ), and every call

1. measures some trajectories at θ, which are rewarded;
2. finds the φ̂ that is most probable, given them and all that was measured before
(`fluctua.learn.fit`); 3. asks the model at p(θ, φ̂) for ∂J/∂p and hands on (∂p/∂θ)ᵀ ∂J/∂p.

One model serves score and twin. Its error is in the error bar, Cov[∇J] = H Λ⁻¹ Hᵀ with H = ∂²J/∂θ∂φ
and Λ the precision of φ̂, and two readings say when not to trust it: the score of new trajectories
has mean zero where the model is right, and so has that of unknowns that are watched and not fitted.
The residuals at φ̂ are examined beside them (`fluctua.core.likelihood.guard`): against a structure
that the unknowns cannot express, whatever the correction.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

from fluctua.core import check
from fluctua.core.arrays import Array, Params
from fluctua.core.estimate import Estimate
from fluctua.core.estimator import PPGT
from fluctua.core.likelihood import alternatives
from fluctua.core.likelihood.evidence import Evidence, measure_readout
from fluctua.core.likelihood.guard import DoubtError
from fluctua.core.likelihood.unknowns import At
from fluctua.core.simulate import Simulator
from fluctua.core.text import names
from fluctua.core.trajectories import Substrate, Trajectories
from fluctua.core.words import close_match
from fluctua.learn.belief import Belief, Posterior, beyond, chosen, like, prior_precision
from fluctua.learn.calibratable import CalibratableModel, CalibratableProcess
from fluctua.learn.fit import BENT, SETTLED, Fit, Likelihood, fit_map, measure_bend
from fluctua.learn.kept import Kept, pack, restore_kept
from fluctua.learn.shrunk_correction import Weighed, weigh

CORRECTIONS = ("none", "simulated", "measured", "weighted")
MEASURED = ("measured", "weighted")
FROM_BATCHES = "measured"
"""The readout's noise as every batch has it."""

RENEWED = "renewed"
"""Begins the event of a call before which everything was forgotten."""

NEW_TASK = "new task"
"""The event of a call whose model is another than that of the call before."""

WEIGHTS = "correction_"
"""Marks what the weights of the correction remember, in a state."""

ON_DOUBT = ("stop", "continue")

DOUBT = "doubt"
"""The reason of a doubt, in a state."""

TESTS = "residuals_"
"""Marks the sums of the residual tests, in a state."""

MOST_TESTS = 5000
"""Sums of residual tests that are kept from call to call; larger systems have enough steps in each
call.
"""

SUMS = ("information", "vector", "trajectories", "calls", "surprise")


@dataclass(frozen=True)
class Effective:
    """(θ, u (K,)) -> p of the user's (θ, φ) -> p.

    A record, so that equal ones share a compilation.
    """

    effective: Callable[[Params, Params], Params]
    tree: Any
    shapes: tuple[tuple[int, ...], ...]

    def __call__(self, theta: Params, u: Array) -> Params:
        """The parameters p of the model."""
        edges = np.cumsum([math.prod(shape) for shape in self.shapes])[:-1]
        leaves = [
            part.reshape(shape)
            for part, shape in zip(jnp.split(u, edges), self.shapes, strict=True)
        ]
        return self.effective(theta, jax.tree.unflatten(self.tree, leaves))


class SelfCalibrating:
    """An estimator of ∇θJ that calibrates its model as it measures: (key, theta, count) ->
    Estimate.

    Args:
        model: an estimator with a twin in the parameters p, which simulates:
            ppgt(simulator, objective, baseline=Twin()), or task.estimator("cpu", baseline="twin")
            of a resonator network. For a task that changes on the way, call -> such an estimator:
            what is known of the device stays, and the history says when.
        device: (key, theta, count) -> Trajectories, an instrument or what stands for one. Every one
            is counted.
        effective: (theta, phi) -> p, written in JAX: {"omega": theta["omega"] + phi["offset"],
            ...}.
        unknown: φ before anything was measured, any pytree of floats.
        spread: standard deviations of φ about that, a pytree like φ or a prefix of it.
        watch: names of φ at its top level that are held where they are and watched: what the model
            leaves out, such as couplings beyond the nearest. Leave a name out of `watch` to have it
            fitted.
        forget_after: calls over which measurements fade, for a device that changes slowly; inf
            keeps everything.
        renew: forget everything before a call whose trajectories were not expected (χ² of their
            score beyond doubt), for a device that jumps. The history of a run says when (`event`).
        correction: "none" takes the model's direct part alone, its noise-free gradient; "simulated"
            adds the correction of its own simulated trajectories, which is what noise does to the
            gradient; "measured" takes direct part and correction of the measured trajectories, in
            which the score tells what the model's path misses. Their model is the one that was
            calibrated before them: fitted to their noise, it would take that for granted.
                "weighted" takes of that correction as much as is resolved over `steps` calls
                (`fluctua.learn.shrunk_correction`).
        steps: calls whose steps add up; see `ShrunkCorrection`. It matters with
            correction="weighted" alone.
        simulated: trajectories that the model runs a call. They cost time and no measurement.
        samples: of the calibration's error in the gradient; exact, one for each unknown, where
            these are as few.
        measure_every: calls of which one measures; in the others the model alone is asked, and J is
            the model's.
        every: steps of which one counts for the information; see `evidence`.
        readout: standard deviation of the measurement on each component of a sample, or "measured",
            which takes it from every batch. What it would do to the calibration is taken off; see
            `evidence`.
        on_doubt: "stop" refuses the call after one whose trajectories are not those of the model
            (`DoubtError`), before anything is measured; "continue" goes on with a warning. The
            history of a run has the event in both.
        returns: (theta, trajectories) -> returns (E,), what the output of the device says. By
            default the method `returns` of the device, if it has one. Otherwise they follow from
            the states by the model at φ̂: right where all between state and reward is known or
            among the unknowns, such as γ_e of the leads of a resonator network.

    `calibration` says what is known, `doubt` why not to trust it, if so. It has a state; put it
    back to go on where another left off. Trajectories of a model that is not linear in φ are part
    of it until a Gaussian describes them (`fluctua.learn.kept`).

    >>> model, device = fl.ppgt(simulator, objective, baseline=fl.Twin()), simulator
    >>> effective = lambda theta, phi: {**theta, "k": theta["k"] + phi}
    >>> fl.SelfCalibrating(model, device, effective, jnp.zeros(()), spread=0.2)(key, theta, 4)

    """

    def __init__(
        self,
        model: PPGT | CalibratableModel | Callable[[int], PPGT | CalibratableModel],
        device: Substrate,
        effective: Callable[[Params, Params], Params],
        unknown: Params,
        spread: Params,
        *,
        watch: Sequence[str] = (),
        forget_after: float = math.inf,
        renew: bool = False,
        correction: str = "none",
        steps: float = 100,
        simulated: int = 16,
        samples: int = 8,
        measure_every: int = 1,
        every: int = 1,
        readout: float | str = 0.0,
        on_doubt: str = "stop",
        returns: Callable[[Params, Trajectories], Any] | None = None,
    ):
        counts = (simulated, samples, measure_every, every)
        _check_options(correction, forget_after, steps, readout, *counts)
        if on_doubt not in ON_DOUBT:
            raise ValueError(
                f"`on_doubt` is one of {', '.join(map(repr, ON_DOUBT))}; got {on_doubt!r}."
            )
        unknown = check.parameters(unknown)
        leaves, tree = jax.tree.flatten(unknown)
        size = sum(leaf.size for leaf in leaves)
        # an estimator can be called too: what has the parts of one is one
        scheduled = callable(model) and not isinstance(model, PPGT) and not hasattr(model, "split")
        self._task_of: Callable[[int], Any] = model if scheduled else lambda call: model  # type: ignore[assignment]
        self._turn_to(self._task_of(0))
        self.device = device
        self.effective = effective
        self.unknown = unknown
        self.forget_after = forget_after
        self.correction = correction
        self.simulated = simulated
        self.samples = samples
        self.steps = steps
        self.sums = dict[str, np.ndarray]()
        self.measure_every = measure_every
        self.every = every
        self.renew = renew
        self.event = ""
        self.readout = readout
        self.on_doubt = on_doubt
        self.doubt = ""
        self._tests: alternatives.Table | None = None
        self.returns = getattr(device, "returns", None) if returns is None else returns
        self.at: At = Effective(effective, tree, tuple(leaf.shape for leaf in leaves))
        start = np.concatenate([np.ravel(np.asarray(leaf, np.float64)) for leaf in leaves])
        empty = np.zeros((size, size))
        self.belief = Belief(
            start, prior_precision(spread, unknown), empty, np.zeros(size), ~chosen(unknown, watch)
        )
        self._kept = Kept(self.belief)
        self._trajectories = self._calls = self._last = 0
        self._surprise = (0.0, 0)

    def cost(self, theta: Params) -> int:
        """Measured trajectories per sample: 0 after a call that asked the model alone."""
        return int(self._last > 0 or self._calls == 0)

    @property
    def pilot(self) -> int:
        """None: what calibrates is what is rewarded."""
        return 0

    def __call__(self, key: Array, theta: Params, count: int) -> Estimate:
        """Estimate ∇θJ, from `count` new trajectories and all before them."""
        self.check_doubt()
        check.count(count, 2 if self.correction in MEASURED else 1)
        theta = check.parameters(theta)
        k_device, k_model, k_error = jax.random.split(key, 3)
        task = self._task_of(self._calls)
        self.event = ""
        if task is not self._task:
            self._turn_to(task)
            self._kept = Kept(self.belief)  # trajectories of another task are of another model
            self.event = NEW_TASK
        measured = None
        before = self.belief
        if self._calls % self.measure_every == 0:
            measured = self.device(k_device, theta, count)
            self.learn(theta, measured)
        self._last = 0 if measured is None else count
        self._calls = self._calls + 1

        scored = measured if self.correction in MEASURED and before.information.any() else None
        belief = self.belief if scored is None else before
        direct, correction, returns = self._rows(k_model, theta, belief.mean, scored)
        made = self._combined(theta, direct, correction, scored)
        gradient = made.gradient
        departed = self._calibration_variance(k_model, k_error, theta, belief, scored, made)
        variance = made.variance + departed
        stderr = np.hypot(made.stderr, np.sqrt(departed))
        conversion = np.zeros(())
        if measured is not None:
            returns = self._returns(theta, self.belief.mean, measured)
            conversion = self._conversion_variance(k_error, theta, measured, returns.mean())
        many = max(self._last, 1)
        _, unravel = ravel_pytree(theta)

        def shaped(v):
            return unravel(jnp.asarray(v, ravel_pytree(theta)[0].dtype))

        error = returns.std(ddof=1) / np.sqrt(len(returns)) if len(returns) > 1 else np.nan
        error = np.hypot(error, np.sqrt(conversion))
        return Estimate(
            shaped(gradient),
            shaped(stderr),
            shaped(gradient**2 + many * variance),
            jnp.asarray(returns.mean()),
            jnp.asarray(error),
            self._last,
        )

    def learn(self, theta: Params, trajectories: Trajectories) -> None:
        """Refine the calibration by trajectories that were taken at θ, of the device or of
        a recording.
        """
        share = 1 - 1 / self.forget_after
        before = self.belief if share == 1 else self.belief.faded(share)
        kept = self._kept if share == 1 else self._kept.faded(share)
        readout = measure_readout(trajectories) if isinstance(self.readout, str) else self.readout
        tree = jax.tree.structure((theta, trajectories))
        latest = self._likelihood(theta, trajectories, readout)
        likelihoods = [
            self._likelihood(*batch.unpack(tree), batch.readout, batch.weight)
            for batch in kept.batches
        ]
        likelihoods.append(latest)
        fit = fit_map(likelihoods, kept.belief, before.mean)
        self._surprise = fit.surprise()
        if beyond(*self._surprise):
            renewed = self.renew and before.information.any()
            self._add_event(
                "{} χ² {:.4g} of {}".format(RENEWED if renewed else "unexpected", *self._surprise)
            )
            if renewed:
                likelihoods = [latest]
                kept = Kept(before.faded(0.0))
                fit = fit_map(likelihoods, kept.belief, fit.point)
        self.belief = fit.posterior
        self._kept = Kept(fit.posterior)
        if not fit.linear:
            longer = kept.add(pack(theta, trajectories, readout))
            if not (longer.is_full or _is_gaussian(fit, likelihoods, kept.belief)):
                self._kept = longer
        self._trajectories += len(trajectories.x)
        self._examine(theta, trajectories, readout, share)
        self._warn()
        if not fit.converged:
            self._warn_unsettled(fit)

    def _likelihood(
        self, theta: Params, trajectories: Trajectories, readout: float, weight: float = 1.0
    ) -> Likelihood:
        """u -> what trajectories say there, with a weight."""

        def evidence(u: np.ndarray) -> Evidence:
            score, information, linear = self.model.evidence(
                self.at, theta, u, trajectories, self.every, readout
            )
            return Evidence(weight * score, weight * information, linear)

        return evidence

    def _add_event(self, text: str) -> None:
        self.event = f"{self.event}; {text}" if self.event else text

    def _warn_unsettled(self, fit: Fit) -> None:
        self._add_event("calibration not settled")
        warnings.warn(
            "the calibration has not settled: the next Gauss–Newton step would move the unknowns "
            "by "
            f"{fit.step_size:.2g} standard deviations, and {SETTLED:g} was expected. The model "
            "bends strongly in them. "
            "Begin nearer to the device (`unknown`), with a smaller `spread`, or measure more "
            "trajectories per call.",
            RuntimeWarning,
            stacklevel=4,
        )

    def check_doubt(self) -> None:
        """Raise `DoubtError` where the model is in doubt and a run was not asked to go on."""
        if self.doubt and self.on_doubt == "stop":
            raise DoubtError(
                f"the model is in doubt: {self.doubt} What was measured is kept. Mend the model or "
                "the instrument, or "
                'go on with on_doubt="continue".'
            )

    @property
    def calibration(self) -> Posterior:
        """What is known of the device."""
        b = self.belief
        values = b.mean.copy()
        errors = np.zeros(b.start.size)
        errors[b.free] = np.sqrt(np.diag(np.linalg.inv(b.posterior_precision)))
        chi2 = 0.0
        if not b.free.all():
            values[~b.free], errors[~b.free], chi2 = b.watched()

        def tree(v):
            return like(self.unknown, v)

        degrees = int((~b.free).sum())
        watched = tuple(bool(v) for v in ~b.free)
        return Posterior(
            tree(values), tree(errors), self._trajectories, *self._surprise, chi2, degrees, watched
        )

    @property
    def phi(self) -> Params:
        """φ̂, with which the model is asked."""
        return like(self.unknown, self.belief.mean)

    @property
    def state(self) -> dict[str, np.ndarray]:
        """All that is remembered, as plain arrays; empty before the first call."""
        if not self._calls and not self._trajectories:
            return {}
        numbers = (self._trajectories, self._calls, self._surprise)
        values = (
            self.belief.information,
            self.belief.vector,
            *(np.asarray(v, np.float64) for v in numbers),
        )
        remembered = {
            f"{WEIGHTS}{name}": value for name, value in self.sums.items()
        } | self._kept.arrays()
        remembered |= {f"{TESTS}{name}": _pack(sums) for name, sums in (self._tests or {}).items()}
        if self.doubt:
            remembered[DOUBT] = np.array(self.doubt)
        return {
            name: np.array(value)
            for name, value in (*zip(SUMS, values, strict=True), *remembered.items())
        }

    def restore(self, state: Mapping[str, np.ndarray], theta: Params = None) -> None:
        """Put a `state` back; an empty one is that before the first call. theta: not needed
        here.
        """
        if not state:
            self.belief = self.belief.faded(0.0)
            self._kept = Kept(self.belief)
            self._tests = None
            self.doubt = ""
            self.sums = {}
            self._trajectories = self._calls = self._last = 0
            self._surprise = (0.0, 0)
            self._turn_to(self._task_of(0))
            return
        missing = sorted(set(SUMS) - set(state))
        if missing:
            raise ValueError(
                "this is not the state of a `SelfCalibrating`: it has no "
                f"{', '.join(map(repr, missing))}."
            )
        information, vector = (np.array(state[name], np.float64) for name in SUMS[:2])
        if vector.shape != self.belief.vector.shape:
            raise ValueError(
                f"the state is of {vector.size} unknowns and φ has {self.belief.vector.size}. "
                "Begin anew with another "
                "`SelfCalibrating`."
            )
        self.belief = replace(self.belief, information=information, vector=vector)
        self._kept = restore_kept(self.belief, state)
        self._trajectories = int(state["trajectories"])
        self._calls = int(state["calls"])
        self._surprise = (float(state["surprise"][0]), int(state["surprise"][1]))
        marked = {
            name.removeprefix(WEIGHTS): value
            for name, value in state.items()
            if name.startswith(WEIGHTS)
        }
        self.sums = {name: np.array(value) for name, value in marked.items()}
        tests = {
            name.removeprefix(TESTS): _unpack(v)
            for name, v in state.items()
            if name.startswith(TESTS)
        }
        self._tests = tests or None
        self.doubt = str(state.get(DOUBT, ""))
        self._turn_to(self._task_of(max(self._calls - 1, 0)))

    def _turn_to(self, task: Any) -> None:
        """Ask this model from now on."""
        _check_model(task)
        self._task = task
        self.model: CalibratableModel = (
            CalibratableProcess(task) if isinstance(task, PPGT) else task
        )

    # --------------------------------------------------------------------------------- the gradient

    def _rows(
        self, key: Array, theta: Params, u: np.ndarray, scored: Trajectories | None
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """∇θJ if the unknowns are u, a row a trajectory, simulated or of those `scored`; a
        part to weight; returns.
        """
        p, pull = jax.vjp(lambda th: self.at(th, jnp.asarray(u, jnp.result_type(float))), theta)
        parts = (
            self.model.split(key, p, self.simulated)
            if scored is None
            else self.model.recorded(p, scored)
        )

        def rows(each):
            return np.asarray(jax.vmap(lambda g: ravel_pytree(pull(g)[0])[0])(each), np.float64)

        returns = np.asarray(parts.returns, np.float64)
        each = parts.direct
        if self.correction == "weighted":
            return rows(each), rows(parts.correction), returns
        if self.correction != "none":
            each = jax.tree.map(jnp.add, each, parts.correction)
        taken = rows(each)
        return taken, np.zeros_like(taken), returns

    def _combined(
        self, theta: Params, direct: np.ndarray, correction: np.ndarray, scored: Trajectories | None
    ) -> Weighed:
        """The rows put together; what the weights remember is of measured trajectories alone."""
        if self.correction == "weighted" and scored is not None:
            made = weigh(theta, self.sums, direct, correction, self.steps)
            self.sums = made.sums
            return made
        variance = direct.var(axis=0, ddof=1) / len(direct)
        return Weighed(
            direct.mean(axis=0), np.sqrt(variance), variance, np.zeros_like(direct), self.sums
        )

    def _calibration_variance(
        self,
        key: Array,
        k_error: Array,
        theta: Params,
        belief: Belief,
        scored: Trajectories | None,
        made: Weighed,
    ) -> np.ndarray:
        """diag HΛ⁻¹Hᵀ: the gradient at departures of φ that its posterior allows, on the
        same noise. (P,)
        """

        def change(u: np.ndarray) -> np.ndarray:
            direct, correction, _ = self._rows(key, theta, u, scored)
            return (direct + made.worth * correction).mean(axis=0) - made.gradient

        return self._propagate(k_error, belief, change, np.zeros_like(made.gradient))

    def _propagate(
        self,
        key: Array,
        belief: Belief,
        change: Callable[[np.ndarray], np.ndarray],
        total: np.ndarray,
    ) -> np.ndarray:
        """Variance of what changes with φ: the squares of its changes at departures that the
        posterior allows.

        total: zeros of its shape.
        """
        unknowns = int(belief.free.sum())
        if not self.samples or not unknowns:
            return total
        whole = unknowns <= self.samples
        normals = np.eye(unknowns)
        if not whole:
            normals = np.asarray(jax.random.normal(key, (self.samples, unknowns)), np.float64)
        for away in belief.deviations(normals):
            total = total + change(belief.mean + away) ** 2
        return total if whole else total / self.samples

    def _examine(
        self, theta: Params, trajectories: Trajectories, readout: float, fade: float
    ) -> None:
        """Compare the residuals at the calibrated model with common faults, of this call and of all
        together.

        At the posterior mean, which has taken in these trajectories, sums of residuals scatter no
        more than at the
        truth: what the unknowns can express is gone.
        """
        if RENEWED in self.event:
            self._tests = None
        p = self.at(theta, jnp.asarray(self.belief.mean, jnp.result_type(float)))
        residuals, sums, _ = self.model.examine(
            p, trajectories, readout, alternatives.fade(self._tests, fade)
        )
        few = sums is not None and sum(one.total.size for one in sums.values()) <= MOST_TESTS
        self._tests = sums if few else None
        if residuals.cause:
            self._raise_doubt(
                f"the trajectories are not those of the model. {residuals.cause}", stacklevel=5
            )

    def _raise_doubt(self, reason: str, stacklevel: int) -> None:
        """Warn, and keep the reason: for the history, and for the call after this one."""
        self.doubt = self.doubt or reason
        short = reason.split(" (")[0].replace(",", "")
        self.event = "; ".join(filter(None, (self.event, f"{DOUBT}: {short}")))
        warnings.warn(reason, RuntimeWarning, stacklevel=stacklevel + 1)

    # --------------------------------------------------------------------------------- the value

    def _returns(self, theta: Params, u: np.ndarray, measured: Trajectories) -> np.ndarray:
        """Returns of measured trajectories: what the device says, or of the model if the
        unknowns are u. (E,)
        """
        if self.returns is None:
            p = self.at(theta, jnp.asarray(u, jnp.result_type(float)))
            return np.asarray(self.model.returns(p, measured), np.float64)
        returns = np.asarray(self.returns(theta, measured), np.float64)
        if returns.shape != (len(measured.x),):
            raise ValueError(
                f"`returns` must give one number per trajectory, ({len(measured.x)},); got "
                f"{returns.shape}."
            )
        return returns

    def _conversion_variance(
        self, key: Array, theta: Params, measured: Trajectories, value: float
    ) -> np.ndarray:
        """Variance of J by the error of the model that makes returns of states; 0 where the
        device says them.
        """
        if self.returns is not None:
            return np.zeros(())

        def change(u: np.ndarray) -> np.ndarray:
            return self._returns(theta, u, measured).mean() - value

        return self._propagate(key, self.belief, change, np.zeros(()))

    def _warn(self) -> None:
        chi2, degrees = self._surprise
        if beyond(chi2, degrees) and RENEWED not in self.event:
            self._raise_doubt(
                "the calibrated model did not expect what was measured: χ² of the score is "
                f"{chi2:.4g} with {degrees} degrees of freedom. The device has changed (give "
                "`forget_after` or `renew`), the prior is too narrow (`spread`), or the structure "
                "of the model is wrong (`watch` what it leaves out).",
                stacklevel=4,
            )
        if self.belief.free.all():
            return
        known = self.calibration
        if known.structure_is_wrong:

            def flat(tree):
                return np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(tree)])

            watched = np.asarray(known.watched)
            z = (flat(known.unknown) - self.belief.start)[watched] / flat(known.stderr)[watched]
            worst = np.flatnonzero(watched)[int(np.argmax(np.abs(z)))]
            self._raise_doubt(
                "the structure of the model is wrong: what it leaves out is there, with χ² = "
                f"{known.watched_chi2:.4g} "
                f"for {known.watched_degrees} degrees of freedom, most of all "
                f"{names(self.unknown)[worst]} "
                f"({np.max(np.abs(z)):.1f} standard errors). Take it out of `watch` to have it "
                "fitted.",
                stacklevel=4,
            )


# ------------------------------------------------------------------------------------------ helpers


def _is_gaussian(fit: Fit, likelihoods: Sequence[Likelihood], prior: Belief) -> bool:
    """Whether a Gaussian describes the evidence of a fit, and its trajectories are not needed."""
    return fit.converged and measure_bend(likelihoods, fit, prior) <= BENT


def _pack(sums: alternatives.FamilySums) -> np.ndarray:
    """One array. (4, rows, columns)"""
    return np.stack([sums.total, sums.variance, sums.third, np.full_like(sums.total, sums.terms)])


def _unpack(packed: np.ndarray) -> alternatives.FamilySums:
    total, variance, third, count = np.asarray(packed, np.float64)
    return alternatives.FamilySums(total, variance, third, float(count.flat[0]))


def _check_model(model: Any) -> None:
    if isinstance(model, PPGT) and (
        model.method.twin is None or not isinstance(model.substrate, Simulator)
    ):
        raise TypeError(
            "the model of a `SelfCalibrating` simulates and has a twin: ppgt(simulator, ..., "
            "baseline=Twin())."
        )
    model = CalibratableProcess(model) if isinstance(model, PPGT) else model
    lacking = [
        name
        for name in ("split", "recorded", "returns", "evidence", "examine")
        if not hasattr(model, name)
    ]
    if lacking:
        raise TypeError(
            "`SelfCalibrating` needs a model that simulates and has a twin, such as "
            "ppgt(simulator, objective, baseline=Twin()); this "
            f"{type(model).__name__} has no {', '.join(lacking)}."
        )


def _check_options(
    correction: str, forget_after: float, steps: float, readout: float | str, *counts: int
) -> None:
    if correction not in CORRECTIONS:
        raise ValueError(
            f"`correction` is one of {', '.join(map(repr, CORRECTIONS))}; got {correction!r}."
            + close_match(str(correction), CORRECTIONS)
        )
    for name, value in (("forget_after", forget_after), ("steps", steps)):
        if not value >= 1:
            raise ValueError(f"`{name}` is a number of calls, at least 1; got {value!r}.")
    if readout != FROM_BATCHES and (isinstance(readout, str) or not 0 <= readout < math.inf):
        raise ValueError(
            f'`readout` is a standard deviation, 0 or more, or "measured"; got {readout!r}.'
        )
    limits = (("simulated", 2), ("samples", 0), ("measure_every", 1), ("every", 1))
    for (name, least), number in zip(limits, counts, strict=True):
        if not isinstance(number, int) or isinstance(number, bool) or number < least:
            raise ValueError(f"`{name}` must be a whole number, at least {least}; got {number!r}.")
