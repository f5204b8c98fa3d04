"""Fingerprints of a model: going on with another one is refused by the name of what changed."""

from __future__ import annotations

from collections.abc import Callable

from fluctua.core.protocols import Estimator
from fluctua.insitu.model import Model
from fluctua.store.fingerprint import describe
from fluctua.store.parts import Parts, describe_record


def describe_model(model: Model, make: Callable[..., Estimator]) -> Parts:
    """Fingerprints of what a run computes with beside its plan.

    What serves the first calibration and the files only is left out. There are no shapes to trace
    at: the size of the state is known once it is measured.
    """
    parts = {
        "estimator": describe(make),
        "start": describe(model.start),
        "lower": describe(model.lower),
        "upper": describe(model.upper),
        "learning_rate_scale": describe(model.learning_rate_scale),
        "follow": describe(model.methods.follow),
        "correct": describe(model.methods.correct),
    }
    parts |= describe_record("process", model.process, None)
    parts |= describe_record("objective", model.objective, None)
    if model.methods.self_calibration is not None:
        parts |= describe_record("self_calibration", model.methods.self_calibration, None)
    for name, unknown in model.unknowns.items():
        parts |= describe_record(f"unknowns.{name}", unknown, None)
    return parts
