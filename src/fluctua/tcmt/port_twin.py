"""Twin of a network that is calibrated from records at a few of its resonators."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import scipy

from fluctua.core.arrays import Array, Params
from fluctua.core.likelihood import alternatives, guard
from fluctua.core.likelihood import evidence as likelihood_evidence
from fluctua.core.likelihood.report import Residuals
from fluctua.core.likelihood.unknowns import At
from fluctua.core.trajectories import Trajectories
from fluctua.core.twin.correction import TwinSamples
from fluctua.learn.predictions import RecordComparison
from fluctua.tcmt import innovations, port_records, state_scores
from fluctua.tcmt.sampled_twin import SampledTwin

REFIT = 1.25
"""Option `refit` for records at ports: all are fitted again once there are a quarter more."""


@dataclass(frozen=True)
class PortTwin:
    """Twin of a network for `fluctua.SelfCalibrating` that reads some resonators only.

    Its trajectories are records y = [Re ψ, Im ψ] of `sites`, (E, K+1, 2D), which start at zero
    field (`fluctua.tcmt.port_records`). Its parameters p are those of `SampledTwin`.

    sampled: the model with its gradient.
    sites: resonators that are read.
    thin: one of so many samples is used; the time of a fit grows with the cube of their number.
    """

    sampled: SampledTwin
    sites: tuple[int, ...]
    thin: int = 1

    def split(self, key: Array, theta: Params, count: int) -> TwinSamples:
        """Return direct part and correction of simulated trajectories."""
        return self.sampled.split(key, theta, count)

    def recorded(self, theta: Params, trajectories: Trajectories) -> TwinSamples:
        """Raise `ValueError`: a record at the ports has no score of the hidden states."""
        raise ValueError(
            "records at the ports do not hold the states that a measured correction is made of; "
            'use correction="none" or "simulated".'
        )

    def returns(self, theta: Params, trajectories: Trajectories) -> Array:
        """Raise `ValueError`: the power at the output is measured by the device."""
        raise ValueError(
            "the return of a record at the ports is measured by the device: give it a method "
            "`returns`, or the option `returns`."
        )

    def evidence(
        self,
        at: At,
        theta: Params,
        u: np.ndarray,
        trajectories: Trajectories,
        every: int = 1,
        readout: float = 0.0,
    ) -> likelihood_evidence.Evidence:
        """Return the evidence of records about the unknowns. every: not used."""
        p, slope = state_scores.linearise(at, theta, u)
        if self._interval(trajectories) > port_records.max_interval(self.sampled.spec(p)):
            # a step of a fit that went too far
            nothing = np.full((u.size, u.size), np.nan)
            return likelihood_evidence.Evidence(nothing[0], nothing, linear=False)
        by_noise = slope.get("noise", scipy.sparse.csr_array((self._sites, u.size)))
        by_readout = slope.get("readout", scipy.sparse.csr_array((1, u.size)))
        amplitudes = scipy.sparse.vstack([by_noise, by_readout], format="csr")
        noisy = np.unique(amplitudes.nonzero()[1])
        records = self._select_samples(trajectories)
        grid, numbers = self._prepare(p, trajectories, readout)
        powers = np.append(numbers.noise, numbers.readout)
        sums = port_records.collect_port_evidence(
            grid,
            numbers,
            records,
            (2 * powers[:, None] * amplitudes[:, noisy].toarray()).T,
        )
        whole = self.sampled.compute_jacobian(p, slope, u.size)
        jacobian = self._select_drift(p, whole)
        score = jacobian.T @ sums.score
        information = jacobian.T @ (jacobian.T @ sums.information).T
        score[noisy] += sums.noise_score
        information[np.ix_(noisy, noisy)] += sums.noise_information
        return likelihood_evidence.Evidence(
            score, information, linear=False, log_likelihood=float(sums.log_likelihood)
        )

    def misfit(self, theta: Params, trajectories: Trajectories, readout: float) -> float:
        """Return χ² of records per sample against the noise of the model at p."""
        p = {name: np.asarray(v) for name, v in theta.items()}
        longest = port_records.max_interval(self.sampled.spec(p))
        if self._interval(trajectories) > longest:
            raise ValueError(
                "records at ports need several samples per period of the fastest mode: at most "
                f"{longest:.2g} apart; got {self._interval(trajectories):g}."
            )
        return self._measure_innovations(p, trajectories, readout).misfit

    def compare_record(
        self, theta: Params, trajectories: Trajectories, readout: float
    ) -> RecordComparison:
        """Return the first record beside what the model at p expects of it."""
        p = {name: np.asarray(v) for name, v in theta.items()}
        grid, numbers = self._prepare(p, trajectories, readout)
        mean, stderr = port_records.expect_record(grid, numbers)
        samples = slice(self.thin, None, self.thin)
        return RecordComparison(
            np.asarray(trajectories.t, np.float64)[samples],
            tuple(f"{part} psi[{site}]" for part in ("Re", "Im") for site in self.sites),
            mean,
            stderr,
            np.asarray(trajectories.x[0], np.float64)[samples],
        )

    def examine(
        self,
        theta: Params,
        trajectories: Trajectories,
        readout: float,
        earlier: alternatives.Table | None,
    ) -> guard.Examination:
        """Test whether the innovations of records have the variance that the model expects."""
        p = {name: np.asarray(v) for name, v in theta.items()}
        squares, count = self._measure_innovations(p, trajectories, readout)
        stderr = np.full(len(self.sites), 1 / np.sqrt(count))
        residuals = Residuals(squares, stderr, count, law="E|e|²/S of the innovations")
        if residuals.wrong.size:
            worst = int(np.argmax(np.abs(squares - 1)))
            residuals = residuals._replace(
                cause=f"the innovations at resonator {self.sites[worst]} have "
                f"{squares[worst]:.3g} times the variance that the model expects: the model "
                "does not predict the record."
            )
        return guard.Examination(residuals)

    def _select_drift(self, p: Params, jacobian: scipy.sparse.csr_array) -> scipy.sparse.csr_array:
        """Return the rows that `port_records` scores; those of Kerr coefficients only if any."""
        spec = self.sampled.spec(p)
        sizes = innovations.count_numbers(spec)
        families = np.repeat(list(sizes), list(sizes.values()))
        scored = [name for name in port_records.DRIFT if name != "chi" or np.any(spec.chi)]
        return jacobian[np.flatnonzero(np.isin(families, scored))]

    def _interval(self, trajectories: Trajectories) -> float:
        """Return the time between two samples that are used."""
        t = np.asarray(trajectories.t, np.float64)
        return self.thin * float(t[-1] - t[0]) / max(len(t) - 1, 1)

    @property
    def _sites(self) -> int:
        return self.sampled.fused.task.network.sites

    def _measure_innovations(
        self, p: Params, trajectories: Trajectories, readout: float
    ) -> port_records.PortInnovations:
        """Return the innovations of records at p."""
        records = self._select_samples(trajectories)
        return port_records.measure_innovations(*self._prepare(p, trajectories, readout), records)

    def _select_samples(self, trajectories: Trajectories) -> np.ndarray:
        """Return the samples that are used, after the start. (E, K, D) complex"""
        x = np.asarray(trajectories.x)[:, :: self.thin]
        channels = len(self.sites)
        if x.shape[-1] != 2 * channels:
            raise ValueError(
                f"a record of {channels} resonators holds their {2 * channels} quadratures; got "
                f"{x.shape[-1]} components."
            )
        if x.shape[0] < 1 or x.shape[1] < 3:
            raise ValueError(
                "records at ports are at least one trajectory with two samples after the start; "
                f"got {x.shape[0]} with {max(x.shape[1] - 1, 0)}."
            )
        if not np.isfinite(x).all():
            which, sample, _ = np.argwhere(~np.isfinite(x))[0]
            raise ValueError(
                f"sample {sample * self.thin} of record {which} is not a finite number. Measure "
                "the record again, or leave it out."
            )
        return x[:, 1:, :channels] + 1j * x[:, 1:, channels:]

    def _prepare(
        self, p: Params, trajectories: Trajectories, readout: float
    ) -> tuple[port_records.Grid, port_records.PortNumbers]:
        """Return the grid of records and the numbers of the network."""
        spec = self.sampled.spec(p)
        scale = float(np.exp(p["readout"])) if "readout" in p else 1.0
        grid = port_records.make_grid(spec, self.sites, np.asarray(trajectories.t)[:: self.thin])
        return grid, port_records.make_numbers(spec, scale * readout)
