"""Any record as text and as HTML: one row per field, arrays by their shape and range.

`@show_fields` over the class of a record shows it so, in terminals and in notebooks.
"""

from __future__ import annotations

import dataclasses
import textwrap
from collections.abc import Mapping
from typing import Any, TypeVar

import numpy as np

from fluctua.core.display import html
from fluctua.core.display.records import describe_function, describe_range, is_traced

Record = TypeVar("Record")

MAX_NUMBERS = 6
"""Numbers of an array that are listed."""

MAX_ENTRIES = 8
"""Entries of a dictionary or a sequence that are listed."""


def show_fields(kind: type[Record]) -> type[Record]:
    """Show the records of a class, a named tuple or a data class, by their fields."""
    kind.__repr__ = describe_fields  # type: ignore[method-assign]
    kind._repr_html_ = render_fields  # type: ignore[attr-defined]
    return kind


def describe_fields(record: Any) -> str:
    """The record as text: its type, then a row per field."""
    rows = _list_rows(record)
    room = max((len(name) for name, _ in rows), default=0)
    indent = "\n" + " " * (room + 4)
    lines = [f"  {name:<{room}}  {indent.join(_wrap(text, 96 - room))}" for name, text in rows]
    return "\n".join([type(record).__name__, *lines])


def render_fields(record: Any) -> str:
    """The record as HTML for a notebook."""
    rows = [(name, "\n".join(_wrap(text, 96))) for name, text in _list_rows(record)]
    return html.make_table(rows, (), type(record).__name__)


def _list_rows(record: Any) -> list[tuple[str, str]]:
    """Names and texts of the fields; without those that are None or an empty text or table."""
    fields = _list_fields(record) or {}
    return [
        (name, _describe(value))
        for name, value in fields.items()
        if value is not None and not (isinstance(value, Mapping | str) and not value)
    ]


def _wrap(text: str, width: int) -> list[str]:
    lines = (textwrap.wrap(line, width, subsequent_indent="  ") for line in text.splitlines())
    return [piece for pieces in lines for piece in pieces]


def _list_fields(record: Any) -> dict[str, Any] | None:
    """The fields of a named tuple or a data class by name; None of anything else."""
    if hasattr(record, "_asdict"):
        return record._asdict()
    if not dataclasses.is_dataclass(record) or isinstance(record, type):
        return None
    return {each.name: getattr(record, each.name) for each in dataclasses.fields(record)}


def _describe(value: Any) -> str:
    """A value in few words."""
    if callable(value):
        return describe_function(value)[0]
    fields = _list_fields(value)
    if fields is not None:
        return repr(value) if _has_own_text(value) else _join_named(fields)
    if value is None or (isinstance(value, Mapping | tuple | list | str) and not value):
        return "none"
    if isinstance(value, Mapping):
        return _join_named(value)
    if isinstance(value, tuple | list) and not all(map(_is_number, value)):
        texts = [_describe(entry) for entry in value]
        return _join(texts, "\n" if any(" " in text for text in texts) else ", ")
    if hasattr(value, "shape") or isinstance(value, tuple | list) or _is_number(value):
        return _describe_numbers(value)
    return value if isinstance(value, str) else textwrap.shorten(repr(value), 80)


def _has_own_text(record: Any) -> bool:
    """Whether a record has a text that was written for it, and not by Python or from its fields."""
    text = type(record).__repr__
    generated = text.__module__ == "collections" or hasattr(text, "__wrapped__")
    return not generated and text is not describe_fields


def _join_named(entries: Mapping[str, Any]) -> str:
    """`k 0.8, bounds (low 0, high 2)`."""
    texts = []
    for name, value in entries.items():
        text = " ".join(_describe(value).split())
        nested = isinstance(value, Mapping) or _list_fields(value) is not None
        texts.append(f"{name} ({text})" if nested and text != "none" else f"{name} {text}")
    return _join(texts, ", ")


def _join(texts: list[str], separator: str) -> str:
    more = [f"… {len(texts) - MAX_ENTRIES} more"] if len(texts) > MAX_ENTRIES else []
    return separator.join([*texts[:MAX_ENTRIES], *more])


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float | np.number) and not isinstance(value, bool)


def _describe_numbers(value: Any) -> str:
    """A few numbers; shape, type and range of many."""
    if is_traced(value) or np.asarray(value).dtype.kind not in "biufc":
        return f"{np.shape(value)} {getattr(value, 'dtype', '')}".rstrip()
    array = np.asarray(value)
    form = {"b": "", "i": ",", "u": ","}.get(array.dtype.kind, ".6g")
    if array.ndim == 0:
        return format(array.item(), form)
    if array.ndim == 1 and array.size <= MAX_NUMBERS:
        return f"[{', '.join(f'{v:{form}}' for v in array.tolist())}]"
    return f"{array.shape} {array.dtype}, {describe_range(array)}"
