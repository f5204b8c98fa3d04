"""What the source tree holds, for the ceilings of `test_architecture.py`.

Every function returns places, as "core/ppgt.py:12 name": the room is the part before the first
slash.
"""

import ast
import re
from collections import defaultdict
from functools import cache
from pathlib import Path

from fluctua.cli.app import COMMANDS

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "fluctua"
MODULES = sorted(SOURCE.rglob("*.py"))

Function = ast.FunctionDef | ast.AsyncFunctionDef


@cache
def tree(path):
    return ast.parse(path.read_text())


def place(path, node, name=""):
    """Where a node stands, and what it is called."""
    return f"{path.relative_to(SOURCE).as_posix()}:{node.lineno} {name}".rstrip()


def nodes(kind, modules=MODULES):
    """All nodes of a kind, each with the module that holds it."""
    found = []
    for path in modules:
        found += [(path, node) for node in ast.walk(tree(path)) if isinstance(node, kind)]
    return found


def parameters(function):
    """The parameters that a caller gives, `*args` and `**kwargs` not counted."""
    arguments = function.args
    every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    return [parameter for parameter in every if parameter.arg not in ("self", "cls")]


def is_private(function):
    return function.name.startswith("_") and not function.name.startswith("__")


# --------------------------------------------------------------------------------- records


def tuple_parameters():
    """Parameters typed as a tuple whose parts have no names: `tuple[int, float]`."""

    def is_anonymous(parameter):
        annotation = ast.unparse(parameter.annotation) if parameter.annotation else ""
        return re.match(r"[Tt]uple\[", annotation) and "..." not in annotation

    return [
        place(path, parameter, f"{function.name}({parameter.arg})")
        for path, function in nodes(Function)
        for parameter in parameters(function)
        if is_anonymous(parameter)
    ]


def record_slices():
    """Slices between two fixed places, but for texts, shapes, lists of parts and runs of bytes.

    `method[1:3]` takes two fields of a record by their positions.
    """
    cut = ("text", "line", "shape", "name", "parts", "args", "argv", "head", "words")

    def is_fixed(bound):
        return isinstance(bound, ast.Constant) and isinstance(bound.value, int)

    def is_record(node):
        return (
            isinstance(node.slice, ast.Slice)
            and is_fixed(node.slice.lower)
            and is_fixed(node.slice.upper)
            and not ast.unparse(node.value).endswith(cut)
        )

    return [
        place(path, node, ast.unparse(node))
        for path, node in nodes(ast.Subscript)
        if is_record(node)
    ]


def tuple_assignments():
    """Lines such as `a, b = c, d`."""
    return [
        place(path, node, ast.unparse(node.targets[0]))
        for path, node in nodes(ast.Assign)
        if isinstance(node.targets[0], ast.Tuple) and isinstance(node.value, ast.Tuple)
    ]


# --------------------------------------------------------------------------------- size


def crowded_imports(ceiling):
    """Modules that import more names than the ceiling; lists of public names excepted."""
    names = defaultdict(set)
    for path, node in nodes(ast.Import | ast.ImportFrom):
        names[path] |= {alias.asname or alias.name for alias in node.names}
    return [
        f"{path.relative_to(SOURCE).as_posix()} {len(imported)}"
        for path, imported in names.items()
        if len(imported) > ceiling and path.name != "__init__.py"
    ]


def long_signatures(private, public):
    """Functions of more parameters than allowed; the commands of the command line excepted."""

    def is_command(path, function):
        return path.parent.name == "cli" and function.name.replace("_", "-") in COMMANDS

    return [
        place(path, function, f"{function.name} {len(parameters(function))}")
        for path, function in nodes(Function)
        if len(parameters(function)) > (private if is_private(function) else public)
        and not is_command(path, function)
    ]


# --------------------------------------------------------------------------------- words


def repeated_classes():
    """Names of classes that are defined in more than one place."""
    places = defaultdict(list)
    for path, node in nodes(ast.ClassDef):
        places[node.name].append(place(path, node))
    return {name: where for name, where in places.items() if len(where) > 1}


def functions_named_of():
    """Functions named `x_of` or `of_x`.

    `function_of_means` is the name of what it makes: an objective that is a function of means.
    """
    return [
        place(path, function, function.name)
        for path, function in nodes(Function)
        if re.search(r"(^|_)of(_|$)", function.name) and function.name != "function_of_means"
    ]


def persons():
    """The words nobody, whoever, somebody and told in the source and the documentation."""
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    return [
        f"{room}/{path.name}: {word}"
        for room, paths in (("src", MODULES), ("docs", pages))
        for path in paths
        for word in re.findall(r"\b(?:nobody|whoever|somebody|told)\b", path.read_text(), re.I)
    ]


# --------------------------------------------------------------------------------- one place


def functions_named(pattern):
    """Where a function is defined whose name matches the whole pattern."""
    return [
        place(path, function, function.name)
        for path, function in nodes(Function)
        if re.fullmatch(pattern, function.name)
    ]


def classes_named(pattern):
    return [
        place(path, node, node.name)
        for path, node in nodes(ast.ClassDef)
        if re.fullmatch(pattern, node.name)
    ]


def modules_with(pattern, suffixes=(".py",)):
    """Files of the source whose text matches a pattern."""
    files = sorted(path for path in SOURCE.rglob("*") if path.suffix in suffixes)
    return [
        path.relative_to(SOURCE).as_posix()
        for path in files
        if re.search(pattern, path.read_text())
    ]
