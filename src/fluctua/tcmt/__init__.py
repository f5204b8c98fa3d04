"""Networks of coupled resonators: stochastic coupled-mode theory, tasks and exact results."""

from fluctua.tcmt import exact
from fluctua.tcmt.classifier import Classification, ReadoutTimes, classification
from fluctua.tcmt.coupled_modes import Drive, Modulation, condition, process
from fluctua.tcmt.examples import Examples
from fluctua.tcmt.experiment import outputs
from fluctua.tcmt.kernel.twin import KernelTwin
from fluctua.tcmt.network import (
    Lead,
    Network,
    chain,
    from_edges,
    honeycomb,
    initial_parameters,
    layered,
    paper,
    parameters,
    rectangular,
    ring,
)
from fluctua.tcmt.tasks import Task, custom, isolation, transmission, with_noise
from fluctua.tcmt.time_step import stability

__all__ = [
    "Classification",
    "Drive",
    "Examples",
    "KernelTwin",
    "Lead",
    "Modulation",
    "Network",
    "ReadoutTimes",
    "Task",
    "chain",
    "classification",
    "condition",
    "custom",
    "exact",
    "from_edges",
    "honeycomb",
    "initial_parameters",
    "isolation",
    "layered",
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
