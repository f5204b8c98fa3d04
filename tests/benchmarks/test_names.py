"""The scripts in benchmarks/ use names of the library that exist."""

import ast
import importlib
import types
from pathlib import Path

import pytest

SCRIPTS = sorted((Path(__file__).parents[2] / "benchmarks").glob("*.py"))


def find_member(module, name):
    """A name of a module or one of its sub-modules; None if there is none."""
    try:
        return getattr(module, name)
    except AttributeError:
        try:
            return importlib.import_module(f"{module.__name__}.{name}")
        except ModuleNotFoundError:
            return None


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_names_of_the_library_exist(script):
    nodes = list(ast.walk(ast.parse(script.read_text())))
    modules = {}
    missing = []
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("fluctua"):
            home = importlib.import_module(node.module)
            for alias in node.names:
                member = find_member(home, alias.name)
                missing += [f"{node.module}.{alias.name}"] if member is None else []
                if isinstance(member, types.ModuleType):
                    modules[alias.asname or alias.name] = member
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name == "fluctua":
                    modules[alias.asname or alias.name] = importlib.import_module("fluctua")
    for node in nodes:
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            home = modules.get(node.value.id)
            if home is not None and find_member(home, node.attr) is None:
                missing.append(f"{node.lineno}: {node.value.id}.{node.attr}")
    assert missing == []
