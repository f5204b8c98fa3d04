"""The plan of a training in situ, from the options of `fluctua insitu`, and its display."""

from __future__ import annotations

import dataclasses
from typing import Any

from fluctua.cli.common import note
from fluctua.core.words import format_count
from fluctua.insitu.device_training.choice import choose_calibration
from fluctua.insitu.device_training.plan import Plan
from fluctua.insitu.device_training.run_and_resume import Rows
from fluctua.insitu.model import Model
from fluctua.store.progress import RunLimits, show_progress

BASELINE = "twin"
"""Default of --baseline."""

FIELDS = {
    "readout_noise": "readout",
}
"""Fields of `insitu.Plan` whose keys have other names."""


def make_plan(values: dict[str, Any], settings: dict[str, Any], **more: Any) -> Plan:
    """The plan of the options that were given; the others have their defaults."""
    known = {field.name for field in dataclasses.fields(Plan)}
    named = {FIELDS.get(key, key): value for key, value in settings.items()}
    if isinstance(named.get("readout"), str) and named["readout"] != "measured":
        named["readout"] = _parse_readout(named["readout"])
    chosen = {
        name: value for name, value in {**values, **named, **more}.items() if value is not None
    }
    if values.get("trajectories") is None and values.get("calibration") == "training":
        chosen["trajectories"] = 2
    return Plan(**{name: value for name, value in chosen.items() if name in known})


def complete_values(values: dict[str, Any], model: Model) -> dict[str, Any]:
    """Complete the options: a calibration that was not given is chosen by the model."""
    if values["calibration"] is not None:
        return values
    chosen = choose_calibration(model)
    if chosen == "training" and values["baseline"] != BASELINE:
        raise ValueError(
            f"--baseline {values['baseline']} is not for a partially observed instrument, which "
            "needs --calibration training. Leave it off."
        )
    return {**values, "calibration": chosen}


def _parse_readout(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"--set readout_noise takes a number or measured; got {text!r}.") from None


def describe_plan(plan: Plan) -> str:
    """Describe a training in one line."""
    iterations = format_count(plan.iterations, "iteration")
    if plan.calibration == "training":
        sparse = f", measured in one of {plan.measure_every}" if plan.measure_every > 1 else ""
        return (
            f"plan       train and calibrate at once, {iterations} of {plan.trajectories}{sparse}"
        )
    return (
        f"plan       calibrate at {format_count(plan.probes, 'setting')}, "
        f"{format_count(plan.probe_trajectories, 'trajectory')} each; then train, {iterations} of "
        f"{plan.trajectories}"
    )


def report_incident(incident: Any) -> None:
    """Print an incident of a run."""
    note(incident.message)


def show_training(rows: Rows, plan: Plan) -> Rows:
    """Pass rows and records on while showing them."""
    with show_progress(RunLimits(plan.iterations), show=True) as progress:
        for row, record in rows:
            progress.add(row)
            yield row, record
