"""Twins of processes that are no diffusions and define their own twin (`fluctua.Jumps`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

from fluctua.core.baselines import Twin
from fluctua.core.twin import correction


@runtime_checkable
class TwinProvider(Protocol):
    """A process that is no diffusion and has a method for its own twin."""

    def check_twin(self, twin: Twin) -> Twin:
        """The twin with its process filled in; refused for what it cannot follow."""

    def twin_parts(self, call: Any) -> Any:
        """`Parts` of simulated trajectories. call: a `sweep.TwinCall`."""

    def recorded_twin_parts(self, call: Any) -> Any:
        """`Parts` of recorded trajectories. call: a `sweep.RecordedTwinCall`."""


def check_twin(twin: Twin, score: Callable[..., Any], process: Any) -> Twin:
    """The twin of any process that has one, with its process filled in."""
    if isinstance(process, TwinProvider):
        return process.check_twin(correction.check_options(twin))
    return correction.check_twin(twin, score, process)
