"""Refuse keys of a configuration that would be ignored in this training."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from fluctua.runs.config import Config


class Condition(NamedTuple):
    """Condition under which a key counts.

    holds: (config) -> whether it does.
    words: the condition in words, after "it counts".
    """

    holds: Callable[[Config], bool]
    words: str


def is_unknown(config: Config) -> bool:
    """Whether the device differs from its model, or has readout noise or coarse sampling."""
    d = config.device
    return (
        has_own_rates(config)
        or has_own_steps(config)
        or any((d.gain_error, d.offset_error, d.kerr_error, d.second_neighbours, d.readout))
        or d.sample_every > 1
    )


def has_own_rates(config: Config) -> bool:
    """Whether losses, lead couplings or noise amplitudes of the device are hidden."""
    d = config.device
    return any((d.loss_error, d.lead_error, d.noise_error))


def has_own_steps(config: Config) -> bool:
    """Whether the device is integrated by other steps than the model."""
    d = config.device
    return d.finer > 1 or d.integrator not in ("same", config.task.integrator)


def _with_schedule(name: str) -> Condition:
    return Condition(lambda c: c.ensemble.schedule == name, f'with `ensemble.schedule` = "{name}"')


def _with_baseline(kind: str) -> Condition:
    def holds(config: Config) -> bool:
        return config.baseline.kind == kind and not is_unknown(config)

    return Condition(holds, f'on a lattice that is known, with `baseline.kind` = "{kind}"')


CALIBRATING = Condition(is_unknown, "where `device` has errors, as in the preset unknown")
KNOWN = Condition(
    lambda c: not is_unknown(c),
    "on a lattice that is known. A `device` is trained by the twin of its calibrated model: "
    "--baseline twin. What can be chosen is `calibration.correction`: none, simulated, measured, "
    "weighted",
)

CONDITIONS = {
    "ensemble.trajectories": _with_schedule("fixed"),
    "ensemble.steps": _with_schedule("steps"),
    "ensemble.budgets": _with_schedule("escalation"),
    "ensemble.window": _with_schedule("escalation"),
    "ensemble.confidence": _with_schedule("escalation"),
    "baseline.kind": KNOWN,
    "baseline.bins": _with_baseline("binned"),
    "baseline.every": Condition(
        lambda c: _with_baseline("binned").holds(c) and c.backend != "jax",
        'on the kernels, with `baseline.kind` = "binned"; on JAX it is always 1',
    ),
    "baseline.rank": _with_baseline("twin"),
    "baseline.forget_after": _with_baseline("twin"),
    "calibration.correction": CALIBRATING,
    "calibration.simulated": CALIBRATING,
    "calibration.samples": CALIBRATING,
    "calibration.measure_every": CALIBRATING,
    "calibration.forget_after": CALIBRATING,
    "calibration.prior": CALIBRATING,
    "calibration.kerr": CALIBRATING,
    "calibration.readout": Condition(
        lambda c: c.device.readout > 0, "where `device.readout` is not 0"
    ),
    "calibration.second_neighbours": CALIBRATING,
}
"""Keys that count in some trainings only."""


def refuse_ignored(config: Config, before: Config) -> None:
    """Refuse a new training whose configuration has a key that would be ignored.

    Args:
        config: of the training.
        before: the configuration it was made from: a preset, or that of another run. Unchanged keys
            are not refused.
    """
    if is_unknown(config) and config.baseline.kind != "twin":  # also by a preset: it is shown
        _refuse("baseline.kind", config.baseline.kind, KNOWN)
    for name in CONDITIONS:
        condition = CONDITIONS[name]
        value = _get(config, name)
        if condition.holds(config) or value == _get(before, name) or name == "baseline.kind":
            continue
        if name.startswith("ensemble.") and config.ensemble.schedule != before.ensemble.schedule:
            continue  # another schedule has other keys
        _refuse(name, value, condition)
    if config.ensemble.schedule == "steps" and not config.ensemble.steps:
        raise ValueError(
            '`ensemble.schedule` = "steps" needs `ensemble.steps`, [[iteration, trajectories], '
            "...]; got none."
        )


def _refuse(name: str, value: Any, condition: Condition) -> None:
    raise ValueError(f"`{name}` = {value!r} would be ignored: it counts {condition.words}.")


def _get(config: Config, name: str) -> Any:
    value: Any = config
    for part in name.split("."):
        value = getattr(value, part)
    return value
