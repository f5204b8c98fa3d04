"""Kernels that an earlier process has made, with their graphs: found again without a trace.

A kernel is described by a file of JSON beside its library, in the folder of `cpu.find_or_build`
and under its rules: a file of this user alone, with the hash of its content beside it.
"""

from __future__ import annotations

import hashlib
import json
import operator
import os
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from fluctua.compiled import cpu
from fluctua.compiled.emit import Layout
from fluctua.compiled.graph import Graph
from fluctua.compiled.trace import Program
from fluctua.core.host.cache_folder import find_cache_folder, make_private_folder


class SavedKernel(NamedTuple):
    """A step that was traced and compiled before. library: path of the passes."""

    program: Program
    layout: Layout
    library: Path


def load_kernel(name: str) -> SavedKernel | None:
    """Return a kernel by its name; None where there is none, or where a file has changed."""
    try:
        place = make_private_folder(find_cache_folder()) / f"{name}.json"
        if not cpu.is_intact(place):
            return None
        record = json.loads(place.read_text(encoding="utf-8"))
    except OSError:
        return None
    library = place.with_name(record["library"])
    if not cpu.is_intact(library):
        return None
    return SavedKernel(_read_program(record), Layout(**record["layout"]), library)


def save_kernel(name: str, program: Program, layout: Layout, library: Path) -> None:
    """Describe a kernel on disk. One whose numbers JAX computes is left out; so are jumps."""
    if program.graph.externals or program.event is not None:
        return
    fields = program._asdict() | {"graph": None}
    record = {
        "library": library.name,
        "ops": program.graph.ops,
        "args": program.graph.args,
        "depends": program.graph.depends,
        "program": fields,
        "layout": layout._asdict(),
    }
    text = json.dumps(record, separators=(",", ":"), default=operator.index)
    place = library.with_name(f"{name}.json")
    with suppress(OSError), tempfile.TemporaryDirectory(dir=place.parent) as folder:
        written = Path(folder) / "kernel.json"
        noted = Path(folder) / "kernel.sha256"
        written.write_text(text, encoding="utf-8")
        written.chmod(0o600)
        noted.write_text(hashlib.sha256(written.read_bytes()).hexdigest())
        os.replace(noted, place.with_suffix(".sha256"))
        os.replace(written, place)


def _read_program(record: dict[str, Any]) -> Program:
    graph = Graph()
    graph.ops = record["ops"]
    graph.args = [tuple(args) for args in record["args"]]
    graph.depends = record["depends"]
    return Program(**record["program"] | {"graph": graph})
