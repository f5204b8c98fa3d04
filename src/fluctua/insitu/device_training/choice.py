"""The estimator of a training on an instrument, and whether plan and model allow it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from fluctua.core.estimator import ppgt
from fluctua.core.protocols import Estimator
from fluctua.insitu.device_training.instruments import check_share
from fluctua.insitu.device_training.plan import Plan
from fluctua.insitu.model import Model

MakeEstimator = Callable[..., Estimator]
"""(substrate, objective, process=...) -> Estimator: `ppgt`, or `functools.partial(ppgt, ...)`."""


def resolve_estimator(plan: Plan, make: MakeEstimator | None) -> MakeEstimator:
    """The function that makes the estimator: the given one, or `ppgt` with the plan's baseline."""
    return partial(ppgt, baseline=plan.baseline) if make is None else make


def choose_calibration(model: Model) -> str:
    """Default calibration of an instrument: one of `plan.CALIBRATIONS`."""
    return "training" if _requires_training(model) else "probes"


def _requires_training(model: Model) -> bool:
    own = model.methods.self_calibration
    return own is not None and own.required


def check_plan(plan: Plan, model: Model, make: MakeEstimator | None, devices: int) -> None:
    """Refuse a plan that the model or the number of devices does not allow."""
    if plan.calibration == "training":
        _check_self_calibration(model, make, devices)
    elif _requires_training(model):
        raise ValueError(
            "a partially observed instrument needs a training that calibrates as it goes; got "
            f'calibration="{plan.calibration}". Use calibration="training" '
            "(--calibration training)."
        )
    check_share(plan, model, devices)


def _check_self_calibration(model: Model, make: MakeEstimator | None, devices: int) -> None:
    """Refuse a training that is to calibrate as it goes and cannot."""
    obstacle = ""
    if devices > 1:
        obstacle = f"is of one device, and there are {devices}"
    elif make is not None:
        obstacle = "makes its own estimator, and one was given"
    elif model.find_self_calibration() is None:
        obstacle = "needs `unknowns`, `x0` and `t` of the model, and this model lacks some of them"
    if obstacle:
        raise ValueError(
            f'a training that calibrates as it goes {obstacle}. Use calibration="probes".'
        )
