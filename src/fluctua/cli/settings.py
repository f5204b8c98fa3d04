"""`--set KEY=VALUE`: settings that few need, each with its kind and an explanation."""

from __future__ import annotations

import textwrap
import tomllib
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, NamedTuple

import typer

from fluctua.core.words import close_match

Settings = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Any other setting, by one of its keys; may be repeated",
    ),
]


class Key(NamedTuple):
    """A key of `--set`. kind: int, float, bool, str, or list for numbers."""

    kind: type
    help: str


Keys = Mapping[str, Key]

KINDS = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "a text",
    list: "a number, or several as [1, 2]",
}


def split_setting(text: str) -> tuple[str, str]:
    """Split `task.horizon=5` into its key and the text of its value."""
    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        raise ValueError(f"--set takes KEY=VALUE, such as task.horizon=5; got {text!r}.")
    return key.strip(), value.strip()


def parse_value(text: str) -> Any:
    """Read a value as TOML has it; a bare word is a text, `1e-3` and `.5` are numbers."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        pass
    try:
        return float(text)
    except ValueError:
        return text


def parse_settings(texts: Sequence[str] | None) -> dict[str, Any]:
    """Read keys of a run file: {"task.horizon": 5}. A key with two different values is refused."""
    settings: dict[str, Any] = {}
    for key, text in map(split_setting, texts or []):
        _put(settings, key, parse_value(text))
    return settings


def read_settings(texts: Sequence[str] | None, keys: Keys) -> dict[str, Any]:
    """Read the settings of a command. An unknown key, or a value of another kind, is refused."""
    settings: dict[str, Any] = {}
    for key, text in map(split_setting, texts or []):
        if key not in keys:
            raise ValueError(
                f"--set has no key {key!r} here; keys are {', '.join(keys)}."
                + close_match(key, list(keys))
            )
        _put(settings, key, _convert(key, text, keys[key].kind))
    return settings


def describe_keys(keys: Keys) -> str:
    """List the keys of `--set` in two columns, for the help of a command."""
    width = max(map(len, keys)) + 2
    rows = [
        textwrap.fill(f"{name:<{width}}{key.help}", 78, subsequent_indent=" " * width)
        for name, key in keys.items()
    ]
    return "\n".join(["\b", "Keys of --set:", *rows])  # \b: keep the lines as they are


def _put(settings: dict[str, Any], key: str, value: Any) -> None:
    if settings.setdefault(key, value) != value:
        raise ValueError(
            f"`{key}` was given twice, as {settings[key]!r} and as {value!r}. Give one."
        )


def _convert(key: str, text: str, kind: type) -> Any:
    if kind is str:
        return text
    value = parse_value(text)
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if kind is list:
        values = value if isinstance(value, list) else [value]
        if values and all(isinstance(one, int | float) for one in values):
            return [float(one) for one in values]
    elif kind is float and number:
        return float(value)
    elif isinstance(value, kind) and (kind is bool or number):
        return value
    raise ValueError(f"--set {key} takes {KINDS[kind]}; got {text!r}.")
