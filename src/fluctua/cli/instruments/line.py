"""Connections of `fluctua insitu` to instruments, with their models."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from fluctua import insitu, tcmt
from fluctua.cli.common import note, say
from fluctua.insitu import instrument
from fluctua.insitu.bench.device import MAX_NOISE
from fluctua.insitu.device_training.plan import Plan
from fluctua.insitu.instrument.virtual import BenchDescription as Sheet
from fluctua.runs import advise
from fluctua.store.code import is_code, load_code

Connect = Callable[[], instrument.VirtualBench]


class Request(NamedTuple):
    """What to train, and where.

    targets: addresses, or `FILE.py:NAME`.
    out: folder of a new run.
    resume: folder of a run to continue.
    model: code of the model of a user's own instrument.
    """

    targets: list[str]
    out: Path | None
    resume: Path | None
    model: str | None


class Line(NamedTuple):
    """Connection to one instrument or several.

    connect: opens the instrument, or a list for several.
    model: of the instruments.
    plan: with injected noise.
    """

    connect: Any
    model: insitu.Model
    plan: Plan


def open_line(request: Request, plan: Plan, settings: dict[str, Any]) -> Line:
    """Make the connection to the instruments of a request."""
    code = [is_code(target) for target in request.targets]
    if any(code):
        if not all(code) or request.model is None:
            raise ValueError(
                "an instrument of your own needs its model: fluctua insitu FILE.py:NAME --model "
                "FILE.py:NAME --out FOLDER."
            )
        connects = [
            load_code(one, "a function that opens an instrument") for one in request.targets
        ]
        return Line(_unwrap_single(connects), _load_model(request.model), plan)
    if request.model is not None:
        raise ValueError(
            "--model is for an instrument of your own, FILE.py:NAME; one at an address has the "
            "model of its data sheet."
        )
    timeout = settings.get("timeout", 30.0)
    connects = [partial(instrument.VirtualBench, one, timeout=timeout) for one in request.targets]
    sheet = read_sheet(connects, plan.attempts)
    if "sigma_w" in settings:
        plan = dataclasses.replace(plan, noise=_find_injected(settings["sigma_w"], sheet, plan))
    options: dict[str, Any] = {
        "points": plan.points,
        "timeout": timeout,
        "noise": plan.noise,
        "sigma_kappa": plan.sigma_kappa,
    }
    each = [partial(instrument.VirtualBench, one, **options) for one in request.targets]
    return Line(_unwrap_single(each), build_model(sheet, plan), plan)


def _unwrap_single(connects: list[Any]) -> Any:
    """The only function that opens an instrument, or the list of several."""
    return connects if len(connects) > 1 else connects[0]


def _load_model(text: str) -> insitu.Model:
    """The `insitu.Model` that `FILE.py:NAME` is, or returns."""
    expected = "an insitu.Model, or a function without arguments that returns one"
    model = load_code(text, expected)
    if callable(model) and not isinstance(model, type):
        model = model()
    if not isinstance(model, insitu.Model):
        raise TypeError(f"{text} must be {expected}; got {type(model).__name__}.")
    return model


def read_sheet(connects: Sequence[Connect], attempts: int) -> Sheet:
    """The data sheet of the first of several instruments that answers.

    An invalid reply is asked for again, a line that is dead is not.
    """
    for left, connect in zip(reversed(range(len(connects))), connects, strict=True):
        try:
            bench = _connect(connect, attempts)
            break
        except instrument.InstrumentError as error:
            if not left or isinstance(error, instrument.CommandRejected):
                raise
            note(str(error))
    bench.close()
    return bench.description


def _build_network(sheet: Sheet) -> tcmt.Network:

    return tcmt.rectangular(sheet.rows, sheet.columns, sigma_w=sheet.sigma_w)


def build_model(sheet: Sheet, plan: Plan) -> insitu.Model:
    """The model of an instrument, from its data sheet."""
    bounds = {"omega": (-plan.omega_max, plan.omega_max), "kappa": (0.0, plan.kappa_max)}
    if plan.kerr:
        # at the edge the Kerr effect detunes by a few couplings where the light is
        bounds["chi"] = (-0.05, 0.05)
    return insitu.network_model(
        _build_network(sheet),
        interval=sheet.interval,
        points=plan.points,
        bounds=bounds,
        sigma_kappa=plan.sigma_kappa,
    )


def _find_injected(text: str, sheet: Sheet, plan: Plan) -> float:
    """The noise to inject for the wanted σ_W; that of the device adds in squares."""
    own = sheet.sigma_w
    largest = float(np.hypot(sheet.sigma_w, MAX_NOISE))
    if text == "auto":
        task = tcmt.transmission(
            _build_network(sheet),
            horizon=(plan.points - 1) * sheet.interval,
            dt=sheet.interval,
            sigma_kappa=plan.sigma_kappa,
        )
        grid = np.geomspace(own, largest, 4).tolist()
        start = {"omega": np.zeros(task.network.sites), "kappa": np.ones(len(task.network.bonds))}
        best = advise.advise(
            jax.random.key(plan.seed),
            task,
            start,
            trajectories=plan.trajectories,
            sigma_w=grid,
        ).best
        wanted = best.sigma_w
        say(
            f"noise      σ_W = {wanted:.3g} of {own:.3g} to {largest:.3g}, limited by the "
            f"{best.limited_by}"
        )
    else:
        try:
            wanted = float(text)
        except ValueError:
            raise ValueError(f"--set sigma_w takes a number or auto; got {text!r}.") from None
    if not own * (1 - 1e-9) <= wanted <= largest * (1 + 1e-9):
        raise ValueError(
            f"--set sigma_w must be {own:g} to {largest:.3g}: the device's own noise, and what "
            f"can be added to it; got {wanted:g}."
        )
    return float(np.sqrt(max(wanted**2 - own**2, 0.0)))


def _connect(connect: Connect, attempts: int) -> instrument.VirtualBench:
    """Open an instrument; an invalid reply is asked for again."""
    for _ in range(attempts - 1):
        try:
            return connect()
        except instrument.InvalidReply as error:
            note(str(error))
    return connect()
