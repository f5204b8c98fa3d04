"""Twin of a network that is calibrated from noisy samples, with losses, leads and noise unknown."""

from __future__ import annotations

import dataclasses
import functools
from typing import NamedTuple

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


@dataclasses.dataclass(frozen=True)
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

    @property
    def leaves_processor(self) -> bool:
        """Whether the processor is free while trajectories are simulated."""
        return self.fused.leaves_processor

    @functools.cached_property
    def _sizes(self) -> dict[str, int]:
        """Numbers of every family of `innovations.FAMILIES`."""
        return innovations.count_numbers(conversion.kernel_spec(self.task, {}, self.fused.s_plus))

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

    def evidence_score(
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
        sizes = self._sizes
        rates = np.asarray(p.get("gamma_e", network.gamma_e), np.float64)
        losses = np.asarray(p.get("gamma", network.gamma), np.float64)
        square = network.lead_weights**2
        double_q = 2 * (square @ (network.sigma_e**2 * rates) + network.sigma_r**2 * losses)
        leads = scipy.sparse.coo_array(square)
        site, lead = leads.coords
        driven = np.array(sorted({drive.lead for drive in self.task.drives}), int)
        blocks = [_SlopeBlock(name, name, *_make_diagonal(np.ones(sizes[name]))) for name in PLAIN]
        blocks += [
            _SlopeBlock("damping", "gamma", *_make_diagonal(np.ones(network.sites))),
            _SlopeBlock("damping", "gamma_e", site, lead, leads.data),
            # D = √(2γ_e)
            _SlopeBlock(
                "drive", "gamma_e", np.arange(len(driven)), driven, 1 / (2 * rates[driven])
            ),
            _SlopeBlock("noise", "gamma", *_make_diagonal(network.sigma_r**2 / double_q)),
            _SlopeBlock(
                "noise",
                "gamma_e",
                site,
                lead,
                leads.data * network.sigma_e[lead] ** 2 / double_q[site],
            ),
        ]
        return _multiply_blocks([b for b in blocks if b.family in slope], sizes, slope, unknowns)


PLAIN = ("omega", "kappa", "chi", "noise", "readout")
"""Numbers that are parameters themselves."""


class _SlopeBlock(NamedTuple):
    """Derivatives of a family of numbers by a family of parameters, as entries of a matrix."""

    number: str
    family: str
    row: np.ndarray
    column: np.ndarray
    value: np.ndarray


def _make_diagonal(values: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return rows, columns and values of a diagonal matrix."""
    places = np.arange(len(values))
    return places, places, values


def _multiply_blocks(
    blocks: list[_SlopeBlock], sizes: dict[str, int], slope: state_scores.Slopes, unknowns: int
) -> scipy.sparse.csr_array:
    """Return ∂numbers/∂p · ∂p/∂u. (G, K)"""
    total = sum(sizes.values())
    if not blocks:
        return scipy.sparse.csr_array((total, unknowns))
    first_number = dict(zip(sizes, np.cumsum([0, *sizes.values()]), strict=False))
    heights = [rows.shape[0] for rows in slope.values()]
    first_parameter = dict(zip(slope, np.cumsum([0, *heights]), strict=False))
    row = np.concatenate([first_number[b.number] + b.row for b in blocks])
    column = np.concatenate([first_parameter[b.family] + b.column for b in blocks])
    value = np.concatenate([b.value for b in blocks])
    by_parameters = scipy.sparse.csr_array((value, (row, column)), shape=(total, sum(heights)))
    return by_parameters @ scipy.sparse.vstack(list(slope.values()), format="csr")


def _scale_readout(p: Params, readout: float) -> float:
    """Return the readout noise at p."""
    return readout * float(np.exp(p["readout"])) if "readout" in p else readout


def _select_network(p: Params) -> Params:
    return {name: value for name, value in p.items() if name in FAMILIES}
