"""Twin of a network that is calibrated from noisy samples, with losses, leads and noise unknown."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
import scipy

from fluctua.core.arrays import Array, Params
from fluctua.core.likelihood import alternatives, guard
from fluctua.core.likelihood import evidence as likelihood_evidence
from fluctua.core.likelihood.report import Residuals
from fluctua.core.likelihood.unknowns import At
from fluctua.core.trajectories import Trajectories
from fluctua.core.twin.correction import TwinSamples
from fluctua.tcmt import conversion, innovations, state_scores
from fluctua.tcmt.experiment import Experiment
from fluctua.tcmt.fused import Fused
from fluctua.tcmt.kernel.options import KernelSpec
from fluctua.tcmt.network import FAMILIES
from fluctua.tcmt.tasks import Task, scale_noise

EXTRA = ("noise", "readout")
"""Parameters that a network does not have: logarithms of factors on the noise amplitude of every
resonator (N,) and on the readout noise ()."""


@dataclass(frozen=True)
class SampledTwin:
    """Twin of a network for `fluctua.SelfCalibrating`, calibrated by `fluctua.tcmt.innovations`.

    Its parameters p are those of a network, "noise" and "readout" (`EXTRA`). Samples may be far
    apart and noisy, and need not come from the model's own time steps.

    fused: the model's twin on the kernels.
    richer: the task that is calibrated, where it has bonds that the twin does not: watched ones,
        which stay at zero. None if it is that of the twin.
    near: indices of the twin's bonds among those of `richer`.
    """

    fused: Fused
    richer: Experiment | None = None
    near: tuple[int, ...] = ()

    @property
    def task(self) -> Experiment:
        """The task that is calibrated."""
        return self.fused.task if self.richer is None else self.richer

    def split(self, key: Array, theta: Params, count: int) -> TwinSamples:
        """Return direct part and correction of simulated trajectories."""
        model = self._with_noise(theta)
        return self._fill(model.split(key, self._reduce(theta), count), theta)

    def recorded(self, theta: Params, trajectories: Trajectories) -> TwinSamples:
        """Return direct part and correction of measured trajectories."""
        model = self._with_noise(theta)
        return self._fill(model.recorded(self._reduce(theta), trajectories), theta)

    def returns(self, theta: Params, trajectories: Trajectories) -> Array:
        """Return the return of each measured trajectory. (E,)"""
        return self.fused.returns(self._reduce(theta), trajectories)

    def evidence(
        self,
        at: At,
        theta: Params,
        u: np.ndarray,
        trajectories: Trajectories,
        every: int = 1,
        readout: float = 0.0,
    ) -> likelihood_evidence.Evidence:
        """Return the evidence of samples about the unknowns. every: not used."""
        p, slope = state_scores.linearise(at, theta, u)
        evidence = innovations.collect_sampled_evidence(
            self.task,
            self.spec(p),
            trajectories,
            _scale_readout(p, readout),
            self.compute_jacobian(p, slope, u.size),
        )
        return likelihood_evidence.Evidence(evidence.score, evidence.information, linear=False)

    def score(
        self,
        at: At,
        theta: Params,
        u: np.ndarray,
        trajectories: Trajectories,
        every: int = 1,
        readout: float = 0.0,
    ) -> np.ndarray:
        """Return the score of `evidence` alone, in half of its time. (K,)"""
        p, slope = state_scores.linearise(at, theta, u)
        score = innovations.collect_sampled_score(
            self.task, self.spec(p), trajectories, _scale_readout(p, readout)
        )
        return self.compute_jacobian(p, slope, u.size).T @ score

    def examine(
        self,
        theta: Params,
        trajectories: Trajectories,
        readout: float,
        earlier: alternatives.Table | None,
    ) -> guard.Examination:
        """Test whether the innovations of samples have the variance that the model expects."""
        p = {name: np.asarray(v) for name, v in theta.items()}
        squares, samples = innovations.measure_innovations(
            self.task, self.spec(p), trajectories, _scale_readout(p, readout)
        )
        # two quadratures per sample
        stderr = np.full(len(squares), 1 / np.sqrt(samples))
        residuals = Residuals(squares, stderr, samples, law="E|e|²/2S of the innovations")
        if residuals.wrong.size:
            worst = int(np.argmax(np.abs(squares - 1)))
            residuals = residuals._replace(
                cause=f"the innovations of resonator {worst} have {squares[worst]:.3g} "
                "times the variance that the model expects: noise amplitude, readout noise or "
                "drift are not those of the device."
            )
        return guard.Examination(residuals)

    def spec(self, p: Params) -> KernelSpec:
        """Return the numbers of the network at p, with its noise."""
        spec = conversion.kernel_spec(self.task, _select_network(p), self.fused.s_plus)
        if "noise" not in p:
            return spec
        return spec.replace(noise=spec.noise * np.exp(np.asarray(p["noise"], np.float64)))

    def _reduce(self, p: Params) -> Params:
        """Return the parameters of the twin."""
        families = _select_network(p)
        if self.richer is None:
            return families
        return {**families, "kappa": jnp.asarray(p["kappa"])[np.array(self.near)]}

    def _fill(self, parts: TwinSamples, theta: Params) -> TwinSamples:
        """Return the parts in all of p: zero for watched bonds and for `EXTRA`.

        The noise-free path does not depend on noise.
        """

        def fill(gradients: Params) -> Params:
            count = len(next(iter(gradients.values())))
            zeros = {
                name: jnp.zeros((count, *np.shape(value)), jnp.result_type(float))
                for name, value in theta.items()
                if name in EXTRA or name == "kappa"
            }
            whole = {**zeros, **gradients}
            if self.richer is not None:
                whole["kappa"] = zeros["kappa"].at[:, np.array(self.near)].set(gradients["kappa"])
            return {name: whole[name] for name in theta}

        return parts._replace(direct=fill(parts.direct), correction=fill(parts.correction))

    def _with_noise(self, theta: Params) -> Fused:
        """Return the twin with the noise of p."""
        if "noise" not in theta:
            return self.fused
        task = self.fused.task
        assert isinstance(task, Task)
        factor = np.exp(np.asarray(theta["noise"], np.float64))
        return dataclasses.replace(self.fused, task=scale_noise(task, factor))

    def compute_jacobian(
        self, p: Params, slope: state_scores.Slopes, unknowns: int
    ) -> scipy.sparse.csr_array:
        """Return ∂(numbers of `innovations.FAMILIES`)/∂u. (G, K)"""
        network = self.task.network
        none = {
            name: scipy.sparse.csr_array((size, unknowns))
            for name, size in innovations.count_numbers(self.spec(p)).items()
        }
        rows = {name: slope.get(name, none[name]) for name in none}
        gamma = slope.get("gamma", none["damping"])
        gamma_e = slope.get("gamma_e", scipy.sparse.csr_array((network.leads, unknowns)))
        rates = np.asarray(p.get("gamma_e", network.gamma_e), np.float64)
        square = scipy.sparse.csr_array(network.lead_weights**2)
        rows["damping"] = gamma + square @ gamma_e
        driven = sorted({drive.lead for drive in self.task.drives})
        rows["drive"] = _scale_rows(1 / (2 * rates[driven]), gamma_e[driven])  # D = √(2γ_e)
        losses = np.asarray(p.get("gamma", network.gamma), np.float64)
        double_q = 2 * (square @ (network.sigma_e**2 * rates) + network.sigma_r**2 * losses)
        change = square @ _scale_rows(network.sigma_e**2, gamma_e)
        change = change + _scale_rows(network.sigma_r**2, gamma)
        rows["noise"] = rows["noise"] + _scale_rows(1 / double_q, change)
        return scipy.sparse.vstack([rows[name] for name in none], format="csr")


def _scale_rows(factors: np.ndarray, rows: scipy.sparse.csr_array) -> scipy.sparse.csr_array:
    """Return rows times one factor each."""
    return scipy.sparse.diags_array(factors, format="csr") @ rows


def _scale_readout(p: Params, readout: float) -> float:
    """Return the readout noise at p."""
    return readout * float(np.exp(p["readout"])) if "readout" in p else readout


def _select_network(p: Params) -> Params:
    return {name: value for name, value in p.items() if name in FAMILIES}
