"""The line from a setting to the parameter that it moves."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from fluctua.core.arrays import Array


class KnobLine(NamedTuple):
    """A setting and its parameter: θ = offset + gain · setting, element by element."""

    offset: Array | float = 0.0
    gain: Array | float = 1.0

    def set(self, setting: Any) -> Any:
        """The parameter at a setting."""
        return self.offset + self.gain * setting


def read_knob(values: Mapping[str, Any], name: str) -> KnobLine:
    """The knob of a family from its entries `NAME_offset` and `NAME_gain`."""
    return KnobLine(values[f"{name}_offset"], values[f"{name}_gain"])
