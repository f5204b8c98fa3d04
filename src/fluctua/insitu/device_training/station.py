"""Instruments and their model by name: an address, `FILE.py:NAME` or `package.module:NAME`.

A driver is a class, a function that returns a driver, or an object with the methods of one. A model
is an `insitu.Model` or a function that returns one; a function with one argument receives the open
driver. Further arguments, with defaults, are options: `--set NAME=VALUE` on the command line.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from fluctua.core.words import close_match
from fluctua.insitu.device_training.devices import Connect
from fluctua.insitu.instrument.protocol import (
    CommandRejected,
    Instrument,
    InstrumentError,
    InvalidReply,
)
from fluctua.insitu.instrument.virtual import POINTS, VirtualBench
from fluctua.insitu.model import Model
from fluctua.store.code import FORMS, call_code, is_code, load_code, locate_error, make_absolute

METHODS = ("set", "arm", "acquire", "health", "close")
BENCH_MODEL = "fluctua.insitu.bench.bench_model:make_model"
"""Model of an instrument at an address, which takes the commands of docs/virtual_bench.md."""
DRIVER = "a driver (a class, or a function that returns an object with set and acquire)"
MODEL = "a model (an insitu.Model, or a function that returns one)"
HOST_AND_PORT = re.compile(r"[\w.-]+:\d+")
KINDS = {bool: "true or false", int: "a whole number", float: "a number"}


class StationNames(NamedTuple):
    """An experiment by name, as plan.json keeps it.

    instruments: addresses, or names of drivers.
    model: name of the model; empty for that of an instrument at an address.
    options: arguments of drivers and model.
    """

    instruments: tuple[str, ...]
    model: str = ""
    options: Mapping[str, Any] = {}

    def make_absolute(self) -> StationNames:
        """Names with whole paths, which hold from any folder."""
        instruments = tuple(map(make_absolute, self.instruments))
        return self._replace(instruments=instruments, model=make_absolute(self.model))


class Station(NamedTuple):
    """Instruments and their model.

    connects: functions that open the instruments.
    model: of each of them.
    """

    connects: list[Connect]
    model: Model


def load_station(
    names: StationNames,
    *,
    attempts: int = 1,
    report: Callable[[str], None] = lambda text: None,
) -> Station:
    """Load drivers and model, and open an instrument if the function of the model needs it.

    Args:
        names: names and options. An option that neither driver nor model takes is refused.
        attempts: maximum number of attempts to open an instrument that sends invalid replies.
        report: called with the reason of every further attempt.

    Returns: functions that open the instruments, and the model.
    """
    texts = names.instruments
    drivers = {text: _load_driver(text) for text in texts}
    text = names.model or _choose_model(texts)
    code = load_code(text, MODEL)
    functions = {name: driver for name, driver in drivers.items() if callable(driver)}
    if _is_function(code):
        functions[text] = code
    _refuse_unknown_options(names.options, functions)
    # the same driver twice is two devices
    connects = [_make_connect(name, drivers[name], names.options) for name in texts]
    if not _is_function(code):
        return Station(connects, _check_model(text, code))
    values = []
    if _takes_driver(text, code):
        values.append(open_first(connects, attempts, report))
    try:
        model = call_code(text, code, *values, **_select_options(code, names.options))
    finally:
        for driver in values:
            driver.close()
    return Station(connects, _check_model(text, model))


def open_first(
    connects: Sequence[Connect], attempts: int, report: Callable[[str], None]
) -> Instrument:
    """Open the first of several instruments that answers.

    An invalid reply is retried, a lost connection is not.
    """
    for left, connect in zip(reversed(range(len(connects))), connects, strict=True):
        try:
            return _open(connect, attempts, report)
        except InstrumentError as error:
            if not left or isinstance(error, CommandRejected):
                raise
            report(str(error))
    raise ValueError("a station needs one instrument at least; got none.")


def _open(connect: Connect, attempts: int, report: Callable[[str], None]) -> Instrument:
    for _ in range(attempts - 1):
        try:
            return connect()
        except InvalidReply as error:
            report(str(error))
    return connect()


# ----------------------------------------------------------------------------------------- drivers


def _load_driver(text: str) -> Any:
    """The class, function or object of a driver; for an address the driver of a bench there."""
    if is_code(text):
        driver = load_code(text, DRIVER)
        if not callable(driver) and not _is_driver(driver):
            raise TypeError(f"{text} must be {DRIVER}; got {_describe(driver)}.")
        return driver
    if "://" in text or "::" in text:
        return partial(VirtualBench, text, points=POINTS)
    raise ValueError(
        f"{text!r} is no instrument: give an address, tcp://HOST:PORT or a VISA resource such as "
        f"TCPIP::HOST::PORT::SOCKET, or a driver, {FORMS}."
        + (f' Did you mean "tcp://{text}"?' if HOST_AND_PORT.fullmatch(text) else "")
    )


def _is_driver(value: Any) -> bool:
    """Whether an object, not a class, has the methods of a driver."""
    has_methods = callable(getattr(value, "set", None)) and callable(
        getattr(value, "acquire", None)
    )
    return has_methods and not isinstance(value, type)


def _describe(value: Any) -> str:
    return "None" if value is None else type(value).__name__


def _make_connect(text: str, driver: Any, options: Mapping[str, Any]) -> Connect:
    if _is_driver(driver):
        refuse_incomplete(text, driver)
        return partial(_OpenDriver, driver)
    required = _list_required(driver)
    if required:
        raise TypeError(
            f"{text} needs {_join(required)}, and a driver is opened without arguments. Give them "
            "defaults, which --set NAME=VALUE changes, or write a function that returns the driver."
        )
    chosen = _select_options(driver, options)
    make = partial(driver, **chosen) if chosen else driver
    return make if isinstance(driver, partial) else _NamedConnect(text, make)


def refuse_incomplete(text: str, driver: Any) -> None:
    """Refuse an object that lacks methods of a driver."""
    missing = [name for name in METHODS if not callable(getattr(driver, name, None))]
    if missing:
        raise TypeError(
            f"{text} must be {DRIVER}; it is {_describe(driver)}, without "
            f"{', '.join(f'`{name}`' for name in missing)}. A driver has "
            f"{', '.join(METHODS)}; insitu.instrument.make_driver makes one from two functions."
        )


@dataclass(frozen=True)
class _NamedConnect:
    """Function that opens a driver; an error has the name of the driver and the line."""

    text: str
    make: Callable[[], Any]

    def __call__(self) -> Instrument:
        try:
            driver = self.make()
        except InstrumentError:
            raise
        except Exception as error:
            raise InstrumentError(
                f"{self.text} failed while connecting: {locate_error(error)}"
            ) from error
        refuse_incomplete(self.text, driver)
        return driver


class _OpenDriver:
    """A driver that exists already: it cannot be opened again and is therefore never closed."""

    def __init__(self, driver: Instrument):
        self._driver = driver

    def __getattr__(self, name: str) -> Any:
        return getattr(self._driver, name)

    def close(self) -> None:
        """Leave the driver open."""


# ------------------------------------------------------------------------------------------ models


def _choose_model(instruments: Sequence[str]) -> str:
    """Name of the model of instruments for which none was given."""
    own = list(filter(is_code, instruments))
    if own:
        raise ValueError(
            f"{own[0]} is an instrument of your own and needs its model: add --model FILE.py:NAME."
        )
    return BENCH_MODEL


def _is_function(code: Any) -> bool:
    return callable(code) and not isinstance(code, type)


def _check_model(text: str, model: Any) -> Model:
    if not isinstance(model, Model):
        raise TypeError(f"{text} must be {MODEL}; got {_describe(model)}.")
    return model


def _takes_driver(text: str, function: Callable[..., Any]) -> bool:
    """Whether the function of a model has an argument without a default, for the open driver."""
    required = _list_required(function)
    if len(required) > 1:
        raise TypeError(
            f"{text} must be {MODEL}. A function takes the open driver or nothing; this one needs "
            f"{', '.join(required)}. Give the others defaults, and --set NAME=VALUE changes them."
        )
    return bool(required)


# ----------------------------------------------------------------------------------------- options


def _list_parameters(function: Callable[..., Any]) -> list[inspect.Parameter]:
    try:
        return list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):  # written in C, such as a built-in class
        return []


def _list_required(function: Callable[..., Any]) -> list[str]:
    """Arguments without a default."""
    return [
        parameter.name
        for parameter in _list_parameters(function)
        if parameter.default is parameter.empty
        and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    ]


def list_options(function: Callable[..., Any]) -> dict[str, Any]:
    """Arguments with defaults, which `--set` can change."""
    return {
        parameter.name: parameter.default
        for parameter in _list_parameters(function)
        if parameter.default is not parameter.empty
        and parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
    }


def _select_options(function: Callable[..., Any], options: Mapping[str, Any]) -> dict[str, Any]:
    known = list_options(function)
    return {
        name: _convert(name, value, known[name]) for name, value in options.items() if name in known
    }


def _convert(name: str, value: Any, default: Any) -> Any:
    """The value of an option; one of another kind than its default is refused."""
    kind = type(default)
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if kind not in KINDS:
        return value
    if kind is float and number:
        return float(value)
    if type(value) is kind:
        return value
    raise ValueError(f"--set {name} takes {KINDS[kind]}; got {value!r}.")


def _refuse_unknown_options(
    options: Mapping[str, Any], functions: Mapping[str, Callable[..., Any]]
) -> None:
    known = {text: list(list_options(function)) for text, function in functions.items()}
    every = {name for names in known.values() for name in names}
    for option in options:
        if option not in every:
            listed = "; ".join(f"{text} takes {_join(names)}" for text, names in known.items())
            raise ValueError(
                f"--set {option}: neither driver nor model has an argument {option!r} with a "
                f"default. {listed or 'They take none'}." + close_match(option, every)
            )


def _join(names: Sequence[str]) -> str:
    return ", ".join(names) or "none"
