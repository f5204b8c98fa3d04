"""The public interface: names, commands, options, and what examples and pages import."""

import ast
import re
import types
from functools import cache

import click
import typer

import fluctua
import fluctua.insitu
import fluctua.tcmt
from fluctua.cli.app import app
from source_counts import ROOT

TOP = fluctua.__all__
IMPORT = re.compile(r"^ *((?:from|import) fluctua[ .][^\n(]*(?:\([^)]*\))?)", re.MULTILINE)


def find_modules():
    """Modules from which a user imports, by their names."""
    every = {}
    for package in (fluctua, fluctua.tcmt, fluctua.insitu):
        every[package.__name__] = package
        for name in package.__all__:
            value = getattr(package, name)
            if isinstance(value, types.ModuleType):
                every[f"{package.__name__}.{name}"] = value
    return every


def namespaces():
    """The public names of each module from which a user imports."""
    every = find_modules()
    rooms = {"fluctua": {"tcmt", "insitu"}}
    return {
        name: set(getattr(module, "__all__", ())) | rooms.get(name, set())
        for name, module in every.items()
    }


def find_public():
    """Every public function and class by its dotted name."""
    return {
        f"{place}.{name}": getattr(module, name)
        for place, module in find_modules().items()
        for name in getattr(module, "__all__", ())
        if not isinstance(getattr(module, name), types.ModuleType)
    }


@cache
def find_pages():
    """Page of docs/reference on which each name is documented."""
    pages = sorted((ROOT / "docs" / "reference").glob("*.md"))
    entry = re.compile(r"^\.\. auto\w+:: (\S+)", re.MULTILINE)
    return {name: page for page in pages for name in entry.findall(page.read_text())}


def options_of_commands():
    """The options of every command, `--help` not counted."""

    group = typer.main.get_command(app)
    context = click.Context(group)
    options = {}
    for name in group.list_commands(context):
        parameters = group.get_command(context, name).params
        given = [p.name for p in parameters if p.param_type_name == "option"]
        options[name] = [option for option in given if option != "help"]
    return options


def python_texts(folder):
    """Python of the examples, and of the blocks of Python in the pages and the README."""
    if folder == "examples":
        return {path.name: path.read_text() for path in sorted((ROOT / folder).rglob("*.py"))}
    pages = [ROOT / "README.md", *sorted((ROOT / folder).rglob("*.md"))]
    blocks = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
    return {path.name: "\n".join(blocks.findall(path.read_text())) for path in pages}


def private_imports(folder):
    """Imports of names that are not public."""
    public = namespaces()
    private = []
    for file, text in python_texts(folder).items():
        for line in IMPORT.findall(text):
            node = ast.parse(line).body[0]
            names = {alias.name for alias in node.names}
            if isinstance(node, ast.Import):
                hidden = names - public.keys()
            else:
                hidden = names - public.get(node.module, set())
            private += [f"{file}: {line}"] if hidden else []
    return private
