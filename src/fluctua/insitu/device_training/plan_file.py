"""plan.json: the plan of a run with a checksum, so that an edit by hand is noticed.

Every checkpoint holds the plan too: an error names the fields that were edited.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np

from fluctua.store import checkpoint
from fluctua.store.checkpoint import Damaged
from fluctua.store.code import is_code
from fluctua.store.folder import RunFolder, fingerprint
from fluctua.store.parts import PARTS, VERSIONS

ENTRY = "plan"
"""Of a checkpoint."""

CHECKSUM = "checksum"
BESIDE = ("run", CHECKSUM, PARTS, VERSIONS)
"""Entries of plan.json that are no fields of a plan."""

ADJUSTABLE = ("iterations", "time_limit", "on_doubt", "final_trajectories")
"""Fields that may change when a run continues."""

RENAMED = {"memory": "forget_after", "most_omega": "omega_max", "most_kappa": "kappa_max"}
"""Fields of plans that earlier versions wrote, and their names now."""

OPTIONS = ("points", "noise", "sigma_kappa", "kerr", "omega_max", "kappa_max")
"""Fields that earlier versions had for an instrument at an address: options of it now."""

OFFICIAL = (
    "A run continues as it started; only `iterations`, `time_limit`, `on_doubt` and "
    "`final_trajectories` can change, with --iterations, --set time_limit=…, --set on_doubt=… and "
    "--set final_trajectories=… on the command line or by the arguments of resume(). For another "
    "plan start another run."
)


def write_plan(fields: Mapping[str, Any], run: str, parts: Mapping[str, Any]) -> bytes:
    """The content of plan.json.

    Args:
        fields: of the plan.
        run: the fingerprint of the run.
        parts: entries of `stamp_parts`.

    """
    entries = {**fields, "run": run, CHECKSUM: _compute_checksum(fields), **parts}
    return json.dumps(entries, indent=1).encode()


def hold_plan(fields: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """The plan as an entry of a checkpoint."""
    return {ENTRY: np.array(json.dumps(fields))}


def read_entries(place: RunFolder) -> dict[str, Any]:
    """Everything in plan.json; or an error that names the fields that were edited."""
    try:
        entries = json.loads(place.settings.read_text())
        fields = _select_fields(entries)
    except (AttributeError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{place.settings} is no plan of a run, or damaged ({error}).") from None
    held = _read_held(place)
    # runs of earlier versions have no checksum
    intact = entries.get(CHECKSUM, "") in ("", _compute_checksum(fields))
    edited = [name for name in fields if name in held and fields[name] != held[name]]
    if intact:
        edited = [name for name in edited if name not in ADJUSTABLE]
    if edited:
        what = ", ".join(f"`{name}` was {held[name]!r} and is {fields[name]!r}" for name in edited)
        raise ValueError(f"{place.settings} was edited: {what}. {OFFICIAL}")
    if not intact:
        what = "its checksum does not fit"
        raise ValueError(f"{place.settings} was edited, or is damaged: {what}. {OFFICIAL}")
    return entries


def get_fields(entries: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of the plan among the entries of plan.json, by their names now."""
    fields = {RENAMED.get(name, name): value for name, value in _select_fields(entries).items()}
    if "address" not in fields:
        return fields
    instruments = fields.pop("address").split()
    options = {name: fields.pop(name) for name in OPTIONS if name in fields}
    # earlier drivers that users wrote did not receive them
    return {
        **fields,
        "instruments": instruments,
        "options": {} if any(map(is_code, instruments)) else options,
    }


def _select_fields(entries: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of the plan as they stand in plan.json."""
    return {name: value for name, value in entries.items() if name not in BESIDE}


def _compute_checksum(fields: Mapping[str, Any]) -> str:
    return fingerprint(json.dumps(fields, sort_keys=True).encode())


def _read_held(place: RunFolder) -> dict[str, Any]:
    """The plan in the newest good checkpoint; empty where there is none."""
    for path in reversed(checkpoint.list_checkpoints(place.checkpoints)):
        try:
            arrays = checkpoint.read(path)
        except Damaged:  # reported and set aside when the run goes on
            continue
        return json.loads(str(arrays[ENTRY])) if ENTRY in arrays else {}
    return {}
