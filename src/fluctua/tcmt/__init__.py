"""Networks of coupled resonators: stochastic coupled-mode theory, tasks and exact results."""

from fluctua.tcmt import exact
from fluctua.tcmt.coupled_modes import Drive, Modulation, condition, process
from fluctua.tcmt.experiment import outputs
from fluctua.tcmt.kernel.twin import KernelTwin
from fluctua.tcmt.network import (
    Lead,
    Network,
    chain,
    from_edges,
    honeycomb,
    initial_parameters,
    paper,
    parameters,
    rectangular,
    ring,
)
from fluctua.tcmt.tasks import Task, custom, isolation, transmission, with_noise
from fluctua.tcmt.time_step import stability

__all__ = [
    "Drive",
    "KernelTwin",
    "Lead",
    "Modulation",
    "Network",
    "Task",
    "chain",
    "condition",
    "custom",
    "exact",
    "from_edges",
    "honeycomb",
    "initial_parameters",
    "isolation",
    "outputs",
    "paper",
    "parameters",
    "process",
    "rectangular",
    "ring",
    "stability",
    "transmission",
    "with_noise",
]
