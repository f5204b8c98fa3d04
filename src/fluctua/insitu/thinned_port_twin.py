"""Twin of a network that is read at a few resonators, and more often than a fit can use."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fluctua.core.arrays import Array, Params
from fluctua.core.likelihood import alternatives, guard
from fluctua.core.likelihood.evidence import Evidence
from fluctua.core.likelihood.unknowns import At
from fluctua.core.trajectories import Trajectories
from fluctua.core.twin.correction import TwinSamples
from fluctua.tcmt.port_twin import PortTwin


@dataclass(frozen=True)
class ThinnedPortTwin:
    """A `PortTwin` that is calibrated by one of `thin` samples of a record."""

    ports: PortTwin
    thin: int

    def split(self, key: Array, theta: Params, count: int) -> TwinSamples:
        """Return direct part and correction of simulated trajectories."""
        return self.ports.split(key, theta, count)

    def recorded(self, theta: Params, trajectories: Trajectories) -> TwinSamples:
        """Raise, as `PortTwin` does."""
        return self.ports.recorded(theta, trajectories)

    def returns(self, theta: Params, trajectories: Trajectories) -> Array:
        """Raise, as `PortTwin` does."""
        return self.ports.returns(theta, trajectories)

    def evidence(
        self,
        at: At,
        theta: Params,
        u: np.ndarray,
        trajectories: Trajectories,
        every: int = 1,
        readout: float = 0.0,
    ) -> Evidence:
        """Return the evidence of records about the unknowns. every: not used."""
        return self.ports.evidence(at, theta, u, self._thin(trajectories), every, readout)

    def misfit(self, theta: Params, trajectories: Trajectories, readout: float) -> float:
        """Return χ² of records per sample against the noise of the model at p."""
        return self.ports.misfit(theta, self._thin(trajectories), readout)

    def examine(
        self,
        theta: Params,
        trajectories: Trajectories,
        readout: float,
        earlier: alternatives.Table | None,
    ) -> guard.Examination:
        """Test whether the innovations of records have the variance that the model expects."""
        return self.ports.examine(theta, self._thin(trajectories), readout, earlier)

    def _thin(self, trajectories: Trajectories) -> Trajectories:
        t, x, *_ = trajectories
        return Trajectories(np.asarray(t)[:: self.thin], np.asarray(x)[:, :: self.thin])
