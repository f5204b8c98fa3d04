"""Estimator that calibrates its model as it trains a device with unknown offsets and gains.

The structure of the model is known and its numbers are not: a detuning has an offset, a coupling a
gain, a loss was never measured. With these unknowns φ the model's parameters are p(θ, φ), and every
call

1. measures trajectories at θ, which are rewarded;
2. finds the most probable φ̂, given them and all earlier measurements (`fluctua.learn.fit`);
3. computes ∂J/∂p of the model at p(θ, φ̂) and returns (∂p/∂θ)ᵀ ∂J/∂p.

One model serves score and twin. Its error is in the error bar, Cov[∇J] = H Λ⁻¹ Hᵀ with H = ∂²J/∂θ∂φ
and Λ the precision of φ̂. Two tests show when not to trust it: the score of new trajectories has
mean zero where the model is right, and so has the score of unknowns that are watched and not
fitted. The residuals at φ̂ are tested too (`fluctua.core.likelihood.guard`), for a structure that
the unknowns cannot express.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fluctua.core import check
from fluctua.core import estimate as estimates
from fluctua.core import trajectories as records
from fluctua.core.arrays import Array, Params
from fluctua.core.host.threads import limit_blas
from fluctua.core.likelihood import evidence as evidences
from fluctua.core.likelihood import guard
from fluctua.core.protocols import PlainEstimator
from fluctua.learn import belief as beliefs
from fluctua.learn import calibration_tests as testing
from fluctua.learn import effective as models
from fluctua.learn import fit as fitting
from fluctua.learn import kept as keeping
from fluctua.learn import predictions as predicting
from fluctua.learn import shrunk_correction as shrinking
from fluctua.learn.calibration_options import CalibrationOptions

RENEWED = "renewed"
"""First word of the event of a call before which everything was forgotten."""

NEW_TASK = "new task"
"""Event of a call whose model differs from that of the call before."""

WEIGHTS = "correction_"
"""Prefix of the sums of the correction's weights in a state."""


DOUBT = "doubt"
"""Name of the reason of a doubt in a state."""

REFIT_STEPS = 6
"""Maximum number of Gauss–Newton steps of a fit of all records that is repeated later."""

PREDICTIONS = "predictions"
"""Name of the predictions and their measurements in a state."""

DISAGREEMENT = "disagreement"
"""Name of the sums of χ² over calls in a state."""

SUMS = ("information", "vector", "trajectories", "calls", "surprise")


class SelfCalibrating(PlainEstimator):
    """An estimator of ∇θJ that calibrates its model as it measures.

    Args:
        model: an estimator with a twin in the parameters p, which simulates: ppgt(simulator,
            objective, baseline=Twin()), or task.estimator("cpu", baseline="twin") of a resonator
            network. For a task that changes on the way, a function call -> such an estimator: the
            calibration of the device stays, and the history has the event.
        device: (key, theta, count) -> Trajectories, an instrument or a substitute. All its
            trajectories are counted.
        effective: (theta, phi) -> p, written in JAX: {"omega": theta["omega"] + phi["offset"],
            ...}.
        unknown: φ before the first measurement, any pytree of floats.
        spread: standard deviations of φ about that, a pytree like φ or a prefix of it.
        options: further settings, as a record.
        **changes: further settings by name, those of `CalibrationOptions`: watch, forget_after,
            renew, correction, steps, simulated, samples, measure_every, every, refit, readout,
            on_doubt, returns.

    `calibration` is the posterior of φ, `doubt` the reason not to trust it, if any; `predictions`
    compares a model that has `misfit` with each measurement beforehand, `comparison` is that of the
    last call. The estimator has a state; restore it to continue. Trajectories of a model that is
    not linear in φ are part of it until a Gaussian describes them (`fluctua.learn.kept`).

    >>> model = fl.ppgt(simulator, objective, baseline="twin")
    >>> device = lambda key, theta, count: simulator(key, {**theta, "k": theta["k"] + 0.1}, count)
    >>> offset = lambda theta, phi: {**theta, "k": theta["k"] + phi}
    >>> learning = fl.SelfCalibrating(model, device, offset, jnp.zeros(()), spread=0.2)
    >>> estimate = learning(key, theta, 20)
    >>> print(learning.calibration)
    calibrated with 20 trajectories
      phi = 0.14 ± 0.11   fitted
      last call: chi² = 0.7..., 1 expected
    """

    def __init__(
        self,
        model: Any,
        device: records.Substrate,
        effective: models.EffectiveParameters,
        unknown: Params,
        spread: Params,
        *,
        options: CalibrationOptions | None = None,
        **changes: Any,
    ):
        options = replace(CalibrationOptions() if options is None else options, **changes)
        unknown = check.parameters(unknown)
        leaves, tree = jax.tree.flatten(unknown)
        size = sum(leaf.size for leaf in leaves)
        self._select_task = models.as_schedule(model)
        self._set_task(self._select_task(0))
        self.device = device
        self.effective = effective
        self.unknown = unknown
        self.options = options
        self.sums = dict[str, np.ndarray]()
        self.event = ""
        self.doubt = ""
        self.predictions: tuple[predicting.Prediction, ...] = ()
        self.comparison = predicting.MeasurementComparison()
        self._tests: testing.Table | None = None
        own = getattr(device, "returns", None)
        self.returns = own if options.returns is None else options.returns
        self.at = models.Effective(effective, tree, tuple(leaf.shape for leaf in leaves))
        start = np.concatenate([np.ravel(np.asarray(leaf, np.float64)) for leaf in leaves])
        empty = np.zeros((size, size))
        self.belief = beliefs.Belief(
            start,
            beliefs.prior_precision(spread, unknown),
            empty,
            np.zeros(size),
            ~beliefs.find_watched(unknown, options.watch),
        )
        self._kept = keeping.Kept(self.belief)
        self._trajectories = self._calls = self._last = 0
        self._surprise = (0.0, 0)
        self._disagreement = beliefs.Disagreement()

    def cost(self, theta: Params) -> int:
        """Measured trajectories per sample: 0 after a call that used the model alone."""
        return int(self._last > 0 or self._calls == 0)

    def __call__(self, key: Array, theta: Params, count: int) -> estimates.Estimate:
        """Estimate ∇θJ, from `count` new trajectories and all before them."""
        with limit_blas(self.belief.start.size):
            self.check_doubt()
            check.count(count, 2 if self.options.uses_measured else 1)
            theta = check.parameters(theta)
            k_device, k_model, k_error = jax.random.split(key, 3)
            task = self._select_task(self._calls)
            self.event = ""
            self.comparison = predicting.MeasurementComparison()
            if task is not self._task:
                self._set_task(task)
                # trajectories of another task are of another model
                self._kept = keeping.Kept(self.belief)
                self.event = NEW_TASK
            measured = None
            learnt = None
            before = self.belief
            if self._calls % self.options.measure_every == 0:
                measured = self.device(k_device, theta, count)
                misfit = getattr(self.model, "misfit", None)
                if misfit is not None:
                    self._test_prediction(misfit, k_model, k_error, theta, measured)
                learnt = self._update(theta, measured)
                chi2, degrees = self._surprise
                self.comparison = self.comparison._replace(score_chi2=chi2 / max(degrees, 1))
                if not getattr(self.model, "leaves_processor", False):
                    self._conclude(learnt, testing.test_calibration(learnt))
                    learnt = None
            self._last = 0 if measured is None else count
            self._calls = self._calls + 1
            if learnt is None:
                return self._estimate(theta, measured, before, k_model, k_error)
            tests = testing.start_tests(learnt)
            try:
                return self._estimate(theta, measured, before, k_model, k_error)
            finally:
                self._conclude(learnt, tests.result())

    def measure_returns(
        self, key: Array, theta: Params, measured: records.Trajectories
    ) -> tuple[np.ndarray, float]:
        """Returns of trajectories measured at θ (E,), from which nothing is learnt.

        The number is the standard error of their mean that is due to the model between states and
        returns; 0 where the device measures returns.
        """
        self.check_doubt()
        returns = self._returns(theta, self.belief.mean, measured)
        variance = self._conversion_variance(key, theta, measured, returns.mean())
        return returns, float(np.sqrt(variance))

    def _estimate(
        self,
        theta: Params,
        measured: records.Trajectories | None,
        before: beliefs.Belief,
        k_model: Array,
        k_error: Array,
    ) -> estimates.Estimate:
        """The estimate of a call that has learnt. before: the belief before it."""
        scored = measured if self.options.uses_measured and before.information.any() else None
        belief = self.belief if scored is None else before
        direct, correction, returns = self._gradient_rows(k_model, theta, belief.mean, scored)
        combined = self._combine_rows(theta, direct, correction, scored)
        gradient = combined.gradient
        calibration_variance = self._calibration_variance(
            k_model, k_error, theta, belief, scored, combined
        )
        variance = combined.variance + calibration_variance
        stderr = np.hypot(combined.stderr, np.sqrt(calibration_variance))
        conversion = np.zeros(())
        if measured is not None:
            returns = self._returns(theta, self.belief.mean, measured)
            conversion = self._conversion_variance(k_error, theta, measured, returns.mean())
        count_measured = max(self._last, 1)
        leaves, structure = jax.tree.flatten(theta)
        edges = np.cumsum([leaf.size for leaf in leaves])[:-1]

        def shape_like(v: np.ndarray) -> Params:
            parts = zip(np.split(v, edges), leaves, strict=True)
            shaped = [jnp.asarray(part, leaf.dtype).reshape(leaf.shape) for part, leaf in parts]
            return jax.tree.unflatten(structure, shaped)

        error = estimates.sample_error(returns) if len(returns) > 1 else np.nan
        error = np.hypot(error, np.sqrt(conversion))
        return estimates.Estimate(
            shape_like(gradient),
            shape_like(stderr),
            shape_like(gradient**2 + count_measured * variance),
            jnp.asarray(returns.mean()),
            jnp.asarray(error),
            self._last,
        )

    def _test_prediction(
        self,
        misfit: Any,
        key: Array,
        k_error: Array,
        theta: Params,
        measured: records.Trajectories,
    ) -> None:
        """Compare records with what the model expects, before they are used.

        misfit: (p, trajectories, readout) -> χ² per sample.
        """
        belief = self.belief

        def expect(u: np.ndarray) -> np.ndarray:
            return self._gradient_rows(key, theta, u, None)[2].mean()

        value = expect(belief.mean)
        variance = self._propagate(k_error, belief, lambda u: expect(u) - value, np.zeros(()))
        returns = self._returns(theta, belief.mean, measured)
        p = self._parameters(theta, belief.mean)
        prediction = predicting.Prediction(
            float(value),
            float(np.sqrt(variance)),
            float(returns.mean()),
            float(estimates.sample_error(returns)) if len(returns) > 1 else np.nan,
            misfit(p, measured, self._find_readout(measured)),
        )
        self.predictions = (*self.predictions, prediction)
        compare = getattr(self.model, "compare_record", None)
        self.comparison = predicting.MeasurementComparison(
            prediction.value,
            prediction.stderr if self.options.samples else np.nan,  # not computed without them
            prediction.misfit,
            record=compare and compare(p, measured, self._find_readout(measured)),
        )

    def _find_readout(self, trajectories: records.Trajectories) -> float:
        """Standard deviation of the measurement: as given, or from how samples scatter."""
        if isinstance(self.options.readout, str):
            return evidences.measure_readout(trajectories)
        return self.options.readout

    def learn(self, theta: Params, trajectories: records.Trajectories) -> None:
        """Refine the calibration by trajectories taken at θ, of the device or of a recording."""
        with limit_blas(self.belief.start.size):
            learnt = self._update(theta, trajectories)
            self._conclude(learnt, testing.test_calibration(learnt))

    def _update(self, theta: Params, trajectories: records.Trajectories) -> testing.Learnt:
        """Refine the calibration, and leave tests of the residuals to do."""
        share = 1 - 1 / self.options.forget_after
        before = self.belief if share == 1 else self.belief.fade(share)
        kept = self._kept if share == 1 else self._kept.fade(share)
        readout = self._find_readout(trajectories)
        latest = self._likelihood(theta, trajectories, readout)
        batch = keeping.pack(theta, trajectories, readout)
        likelihoods = [latest]
        due = kept.is_due(self.options.refit)
        if not due:
            fit = fitting.fit_map([latest], before, before.mean)
            due = beliefs.exceeds_chance(*fit.surprise())
        if due:
            tree = jax.tree.structure((theta, trajectories))
            before_it = [
                self._likelihood(*other.unpack(tree), other.readout, other.weight)
                for other in kept.batches
            ]
            likelihoods = [*before_it, latest]
            # a later fit goes on where this one stops
            steps = fitting.MAX_STEPS if self.options.refit == 1 else REFIT_STEPS
            fit = fitting.fit_map(likelihoods, kept.belief, before.mean, steps)
            kept = replace(kept, fitted=len(likelihoods))
        self._surprise = fit.surprise()
        if before.information.any():  # the first call is compared with the prior alone
            self._disagreement = self._disagreement.add(*self._surprise, share)
        if beliefs.exceeds_chance(*self._surprise):
            renewed = self.options.renew and before.information.any()
            self._add_event(
                "{} χ² {:.4g} of {}".format(RENEWED if renewed else "unexpected", *self._surprise)
            )
            if renewed:
                likelihoods = [latest]
                self._disagreement = beliefs.Disagreement()
                kept = keeping.Kept(before.fade(0.0))
                fit = fitting.fit_map(likelihoods, kept.belief, fit.point)
        self.belief = fit.belief
        self._trajectories += len(trajectories.x)
        earlier = None if RENEWED in self.event else testing.discount(self._tests, share)
        p = self._parameters(theta, self.belief.mean)
        # at the posterior mean, which includes these trajectories, sums of residuals scatter no
        # more than at the truth: what the unknowns can express is gone
        return testing.Learnt(
            fit,
            self.belief,
            likelihoods,
            kept,
            batch,
            self.options.refit,
            lambda: self.model.examine(p, trajectories, readout, earlier),
        )

    def _conclude(self, learnt: testing.Learnt, tested: testing.Tested) -> None:
        """Keep what was tested, and warn."""
        self._kept = tested.kept
        self._warn_about_watched()  # before tests that only see that something is missing
        self._keep_examination(tested.examination)
        self._warn_about_doubt()
        if not learnt.fit.converged and self.options.refit == 1:
            self._warn_not_settled(learnt.fit)

    def _likelihood(
        self, theta: Params, trajectories: records.Trajectories, readout: float, weight: float = 1.0
    ) -> fitting.BatchLikelihood:
        """The function u -> weighted evidence of trajectories."""
        every = self.options.every
        return fitting.BatchLikelihood(
            self.model, self.at, theta, trajectories, every, readout, weight
        )

    def _add_event(self, text: str) -> None:
        self.event = f"{self.event}; {text}" if self.event else text

    def _warn_not_settled(self, fit: fitting.Fit) -> None:
        self._add_event("calibration not settled")
        warnings.warn(
            "the calibration has not settled: the next Gauss–Newton step would move the unknowns "
            f"by {fit.step_size:.2g} standard deviations, and {fitting.SETTLED:g} was expected. "
            "The model bends strongly in them. Begin nearer to the device (`unknown`), with a "
            "smaller `spread`, or measure more trajectories per call.",
            RuntimeWarning,
            stacklevel=4,
        )

    def check_doubt(self) -> None:
        """Raise `DoubtError` where the model is in doubt and on_doubt="stop"."""
        if self.doubt and self.options.on_doubt == "stop":
            raise guard.DoubtError(
                f"the model is in doubt: {self.doubt} What was measured is kept. Mend the model or "
                'the instrument, or go on with on_doubt="continue".'
            )

    @property
    def calibration(self) -> beliefs.Posterior:
        """The posterior of the unknowns of the device."""
        b = self.belief
        values = b.mean.copy()
        variance = np.zeros(b.start.size)
        inflation = self._disagreement.inflation
        variance[b.free] = inflation * b.variance
        chi2 = 0.0
        if not b.free.all():
            values[~b.free], watched_errors, chi2 = b.watched
            variance[~b.free] = watched_errors**2
            variance[b.free] += b.watched_shift**2 @ self._estimate_watched_size() ** 2

        errors = np.sqrt(variance)
        degrees = int((~b.free).sum())
        watched = tuple(bool(v) for v in ~b.free)
        return beliefs.Posterior(
            beliefs.unflatten_like(self.unknown, values),
            beliefs.unflatten_like(self.unknown, errors),
            self._trajectories,
            *self._surprise,
            chi2,
            degrees,
            watched,
            float(np.sqrt(inflation)),
        )

    def _estimate_watched_size(self) -> np.ndarray:
        """Standard deviation of what is watched, root mean square over its family. Shape (W,).

        Zero where χ² of all of it is that of chance.
        """
        b = self.belief
        values, errors, chi2 = b.watched
        if not beliefs.exceeds_chance(chi2, len(values)):
            return np.zeros(len(values))
        sizes = [np.size(leaf) for leaf in jax.tree.leaves(self.unknown)]
        family = np.repeat(np.arange(len(sizes)), sizes)[~b.free]
        power = np.maximum((values - b.start[~b.free]) ** 2 - errors**2, 0.0)
        means = np.bincount(family, power) / np.maximum(np.bincount(family), 1)
        return np.sqrt(means[family])

    @property
    def phi(self) -> Params:
        """φ̂, the unknowns with which the model is used."""
        return beliefs.unflatten_like(self.unknown, self.belief.mean)

    @property
    def state(self) -> dict[str, np.ndarray]:
        """The state of the estimator as plain arrays; empty before the first call."""
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
        } | self._kept.to_arrays()
        remembered |= testing.pack_sums(self._tests)
        d = self._disagreement
        if d.calls:
            remembered[DISAGREEMENT] = np.array([d.chi2, d.degrees, d.calls])
        if self.predictions:
            remembered[PREDICTIONS] = np.array(self.predictions)
        if self.doubt:
            remembered[DOUBT] = np.array(self.doubt)
        return {
            name: np.array(value)
            for name, value in (*zip(SUMS, values, strict=True), *remembered.items())
        }

    def restore(self, state: Mapping[str, np.ndarray], theta: Params = None) -> None:
        """Restore a `state`; an empty one is that before the first call. theta: not used."""
        if not state:
            self.belief = self.belief.fade(0.0)
            self._kept = keeping.Kept(self.belief)
            self._tests = None
            self.doubt = ""
            self.predictions = ()
            self.sums = {}
            self._trajectories = self._calls = self._last = 0
            self._surprise = (0.0, 0)
            self._disagreement = beliefs.Disagreement()
            self._set_task(self._select_task(0))
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
                "Make another `SelfCalibrating`."
            )
        self.belief = replace(self.belief, information=information, vector=vector)
        self._kept = keeping.restore_kept(self.belief, state)
        self._trajectories = int(state["trajectories"])
        self._calls = int(state["calls"])
        self._surprise = (float(state["surprise"][0]), int(state["surprise"][1]))
        self._disagreement = beliefs.Disagreement(
            *(float(v) for v in state.get(DISAGREEMENT, (0.0, 0.0, 0.0)))
        )
        weights = _select_prefixed(state, WEIGHTS)
        self.sums = {name: np.array(value) for name, value in weights.items()}
        self._tests = testing.unpack_sums(state)
        self.doubt = str(state.get(DOUBT, ""))
        self.predictions = tuple(
            predicting.Prediction(*map(float, row)) for row in state.get(PREDICTIONS, ())
        )
        self._set_task(self._select_task(max(self._calls - 1, 0)))

    def _set_task(self, task: Any) -> None:
        """Use this model from now on."""
        self._task = task
        self.model = models.as_calibratable(task)

    def _parameters(self, theta: Params, u: np.ndarray) -> Params:
        """p(θ, u), the parameters of the model."""
        return models.evaluate(self.at, theta, jnp.asarray(u, jnp.result_type(float)))

    # --------------------------------------------------------------------------------- the gradient

    def _gradient_rows(
        self, key: Array, theta: Params, u: np.ndarray, scored: records.Trajectories | None
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Direct part and correction of ∇θJ at unknowns u, one row per trajectory, and returns.

        scored: measured trajectories; None simulates.
        """
        p = self._parameters(theta, u)
        if scored is None:
            parts = self.model.split(key, p, self.options.simulated)
        else:
            parts = self.model.recorded(p, scored)

        def rows(gradients: Params) -> np.ndarray:
            point = jnp.asarray(u, jnp.result_type(float))
            return np.asarray(models.pull_back(self.at, theta, point, gradients), np.float64)

        returns = np.asarray(parts.returns, np.float64)
        if self.options.correction == "weighted":
            return rows(parts.direct), rows(parts.correction), returns
        gradients = parts.direct
        if self.options.correction != "none":
            gradients = jax.tree.map(jnp.add, gradients, parts.correction)
        direct = rows(gradients)
        return direct, np.zeros_like(direct), returns

    def _combine_rows(
        self,
        theta: Params,
        direct: np.ndarray,
        correction: np.ndarray,
        scored: records.Trajectories | None,
    ) -> shrinking.CombinedGradient:
        """Combine direct part and correction; only measured trajectories enter the weights."""
        if self.options.correction == "weighted" and scored is not None:
            combined = shrinking.combine_parts(
                theta, self.sums, direct, correction, self.options.steps
            )
            self.sums = combined.sums
            return combined
        variance = direct.var(axis=0, ddof=1) / len(direct)
        return shrinking.CombinedGradient(
            direct.mean(axis=0), np.sqrt(variance), variance, np.zeros_like(direct), self.sums
        )

    def _calibration_variance(
        self,
        key: Array,
        k_error: Array,
        theta: Params,
        belief: beliefs.Belief,
        scored: records.Trajectories | None,
        combined: shrinking.CombinedGradient,
    ) -> np.ndarray:
        """diag HΛ⁻¹Hᵀ, from the gradient at deviations of φ under the same noise. Shape (P,)."""

        def change_gradient(u: np.ndarray) -> np.ndarray:
            """Change of the gradient if the unknowns were u, on the same trajectories. (P,)"""
            direct, correction, _ = self._gradient_rows(key, theta, u, scored)
            return (direct + combined.weight * correction).mean(axis=0) - combined.gradient

        return self._propagate(k_error, belief, change_gradient, np.zeros_like(combined.gradient))

    def _propagate(
        self,
        key: Array,
        belief: beliefs.Belief,
        change: models.ArrayFunction,
        total: np.ndarray,
    ) -> np.ndarray:
        """Variance of a quantity due to the posterior of φ: its squared changes at deviations.

        total: zeros of the quantity's shape.
        """
        unknowns = int(belief.free.sum())
        if not self.options.samples or not unknowns:
            return total
        widened = np.sqrt(self._disagreement.inflation)
        exact = unknowns <= self.options.samples
        normals = np.eye(unknowns)
        if not exact:
            normals = np.asarray(
                jax.random.normal(key, (self.options.samples, unknowns)), np.float64
            )
        deviations = widened * belief.scale_deviations(normals)
        if not belief.free.all():
            shifts = np.zeros((int((~belief.free).sum()), belief.start.size))
            sizes = self._estimate_watched_size()
            shifts[:, belief.free] = (belief.watched_shift * sizes).T
            if exact:
                deviations = np.concatenate([deviations, shifts])
            else:
                others = jax.random.normal(jax.random.fold_in(key, 1), (len(normals), len(shifts)))
                deviations = deviations + np.asarray(others, np.float64) @ shifts
        for away in deviations:
            total = total + change(belief.mean + away) ** 2
        return total if exact else total / self.options.samples

    def _keep_examination(self, examination: guard.Examination) -> None:
        """Keep the sums of a test of residuals for the next, and doubt where it failed."""
        residuals, sums, _ = examination
        self._tests = testing.limit_sums(sums)
        if residuals.cause:
            self._raise_doubt(
                f"the trajectories are not those of the model. {residuals.cause}", stacklevel=5
            )

    def _raise_doubt(self, reason: str, stacklevel: int) -> None:
        """Warn, and keep the reason for the history and for the next call."""
        self.doubt = self.doubt or reason
        short = reason.split(" (")[0].replace(",", "")
        self.event = "; ".join(filter(None, (self.event, f"{DOUBT}: {short}")))
        warnings.warn(reason, RuntimeWarning, stacklevel=stacklevel + 1)

    # --------------------------------------------------------------------------------- the value

    def _returns(self, theta: Params, u: np.ndarray, measured: records.Trajectories) -> np.ndarray:
        """Returns of measured trajectories, from the device or from the model at u. Shape (E,)."""
        if self.returns is None:
            p = self._parameters(theta, u)
            return np.asarray(self.model.returns(p, measured), np.float64)
        returns = np.asarray(self.returns(theta, measured), np.float64)
        if returns.shape != (len(measured.x),):
            raise ValueError(
                f"`returns` must give one number per trajectory, ({len(measured.x)},); got "
                f"{returns.shape}."
            )
        return returns

    def _conversion_variance(
        self, key: Array, theta: Params, measured: records.Trajectories, value: float
    ) -> np.ndarray:
        """Variance of J due to the model between states and returns; 0 if measured directly."""
        if self.returns is not None:
            return np.zeros(())

        def change_value(u: np.ndarray) -> np.ndarray:
            """Change of J if the unknowns were u, on the same trajectories."""
            return self._returns(theta, u, measured).mean() - value

        return self._propagate(key, self.belief, change_value, np.zeros(()))

    def _warn_about_watched(self) -> None:
        """Warn where what is watched is there."""
        if self.options.refit > 1 or self.belief.free.all():
            return
        values, _, watched_chi2 = self.belief.watched
        if beliefs.exceeds_chance(watched_chi2, len(values)):
            reason = beliefs.explain_watched(self.calibration, self.belief.start)
            self._raise_doubt(reason, stacklevel=4)

    def _warn_about_doubt(self) -> None:
        """Warn where calls disagree.

        Records that are fitted again disagree at first because the model bends in its unknowns, not
        because it is wrong: of those only the residuals are tested (`_examine`).
        """
        if self.options.refit > 1:
            return
        chi2, degrees = self._surprise
        if beliefs.exceeds_chance(chi2, degrees) and RENEWED not in self.event:
            self._raise_doubt(
                "the calibrated model did not expect what was measured: χ² of the score is "
                f"{chi2:.4g} with {degrees} degrees of freedom. The device has changed (give "
                "`forget_after` or `renew`), the prior is too narrow (`spread`), or the structure "
                "of the model is wrong (`watch` what it leaves out).",
                stacklevel=4,
            )
        if self._disagreement.is_systematic:
            self._raise_doubt(
                "the calls disagree about the unknowns: χ² is "
                f"{self._disagreement.ratio:.3g} per degree of freedom over "
                f"{self._disagreement.calls:.0f} calls, and errors are "
                f"{np.sqrt(self._disagreement.inflation):.2g} times those of the noise; they need "
                "not cover. The structure of the model is wrong (`watch` what it leaves out), or "
                "the device changes (`forget_after`).",
                stacklevel=4,
            )


# ------------------------------------------------------------------------------------------ helpers


def _select_prefixed(state: Mapping[str, np.ndarray], prefix: str) -> dict[str, np.ndarray]:
    """The entries of a state whose names begin with `prefix`, without it."""
    return {k.removeprefix(prefix): v for k, v in state.items() if k.startswith(prefix)}
