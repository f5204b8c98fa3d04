"""The shape of the tree that import-linter does not see; pyproject.toml has the layers and the
ban on cycles.
"""

import ast
from pathlib import Path

import pytest

import public_names
import source_counts as counts
from source_counts import MODULES, SOURCE

TESTS = Path(__file__).parent
FOLDERS = sorted({module.parent for module in MODULES})
PUBLIC = [SOURCE / room for room in ("", "tcmt", "insitu", "insitu/instrument", "insitu/calibrate")]
MOST_MODULES = 22

# Not installed with fluctua, or not on every system, therefore imported where they are needed.
OPTIONAL = {
    "cupy",
    "diffrax",
    "fcntl",
    "gymnasium",
    "msvcrt",
    "pyvisa",
    "pyvisa_py",
    "ray",
    "resource",
    "starlette",
    "torch",
    "torchsde",
    "uvicorn",
}


def within(path, root=SOURCE):
    return path.relative_to(root).as_posix()


parsed = counts.tree


def imports(tree):
    return [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]


def packages(node):
    """Top-level packages that an import statement names."""
    modules = (
        [node.module or ""]
        if isinstance(node, ast.ImportFrom)
        else [alias.name for alias in node.names]
    )
    return {module.split(".")[0] for module in modules}


def local_imports(path):
    """Packages imported elsewhere than at the top of a module: in functions, or for the type
    checker only.
    """
    tree = parsed(path)
    return set().union(*(packages(node) for node in imports(tree) if node not in tree.body))


def exports(folder):
    """Names that a package takes from its modules, without modules and sub-packages made public
    as such.
    """
    package = ".".join(("fluctua", *folder.relative_to(SOURCE).parts))
    nodes = [
        node
        for node in ast.walk(parsed(folder / "__init__.py"))
        if isinstance(node, ast.ImportFrom)
    ]
    names = {
        a.asname or a.name
        for node in nodes
        if node.module not in (package, "typing")
        for a in node.names
    }
    return {name for name in names if not name.startswith("_")}


# Parts that few runs need, and the modules that load them when they do.
ON_DEMAND = {
    "core/diffusion.py",  # lineax, which only noises given by products need
    "core/estimation/recorded_samples.py",  # the guard of recorded trajectories
    "core/host/threads.py",  # threadpoolctl, which saves time alone
    "runs/build.py",  # devices with hidden errors, twins, shards
    "runs/evaluate.py",
    "runs/lattice.py",
    "runs/summary.py",
    "tcmt/fused.py",  # trajectories that were measured
    "tcmt/kernel/run.py",  # CUDA
    "tcmt/kernel/twin.py",
}


def test_imports_stand_at_the_top():
    """But for packages that may be missing, parts on demand, and commands, which start quickly."""
    quick = SOURCE / "cli"
    checked = [p for p in MODULES if not p.is_relative_to(quick) and p != SOURCE / "__init__.py"]
    late = {within(path) for path in checked if local_imports(path) - OPTIONAL}
    assert late <= ON_DEMAND


def test_folders_fit_a_screen():
    counts = {within(folder): len([*folder.glob("[!_]*.py")]) for folder in FOLDERS}
    assert not {name: count for name, count in counts.items() if count > MOST_MODULES}


def test_internal_packages_hold_a_docstring_only():
    bodies = {
        folder: parsed(folder / "__init__.py").body for folder in FOLDERS if folder not in PUBLIC
    }
    more = {
        folder
        for folder, body in bodies.items()
        if len(body) != 1 or not isinstance(body[0], ast.Expr)
    }
    assert not {within(folder) for folder in more}


def test_public_packages_list_their_names():
    def list_names(folder):
        assignments = [
            node for node in parsed(folder / "__init__.py").body if isinstance(node, ast.Assign)
        ]
        values = [node.value for node in assignments if ast.unparse(node.targets[0]) == "__all__"]
        return set(ast.literal_eval(values[0])) if values else set()

    assert not {within(folder) for folder in PUBLIC if exports(folder) - list_names(folder)}


def test_no_module_is_shadowed_by_a_name_that_its_package_exports():
    modules = {folder: {path.stem for path in folder.iterdir()} for folder in PUBLIC}
    assert not set().union(*(modules[folder] & exports(folder) for folder in PUBLIC))


def test_tests_mirror_the_tree_and_do_not_import_from_each_other():
    files = [path for path in TESTS.rglob("*.py") if not path.is_relative_to(TESTS / "support")]
    rooms = {path.parent.relative_to(TESTS) for path in files} - {Path("benchmarks")}
    assert not {room for room in rooms if not (SOURCE / room).is_dir()}
    borrowing = {
        within(path, TESTS)
        for path in files
        if any(
            package.startswith("test")
            for node in imports(parsed(path))
            for package in packages(node)
        )
    }
    assert not borrowing


def test_variables_say_what_they_hold():
    """Not what was done to them: names as below fit everything."""
    empty = {"told", "said", "found", "given"}

    def find_bound(node):
        """The name that a node gives to something, if it does."""
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            return node.id
        return (
            getattr(node, "arg", None)
            if isinstance(node, ast.arg | ast.keyword)
            else getattr(node, "name", None)
        )

    names = {
        (within(path), find_bound(node)) for path in MODULES for node in ast.walk(parsed(path))
    }
    assert not {(path, name) for path, name in names if name in empty}


def test_programs_are_compiled_in_full_precision():
    """By `fluctua.core.arrays.jit`: a plain `jax.jit` multiplies matrices in TF32 on a GPU."""

    def is_plain(node):
        return isinstance(node, ast.Attribute) and ast.unparse(node) == "jax.jit"

    users = [path for path in MODULES if any(map(is_plain, ast.walk(parsed(path))))]
    assert users == [SOURCE / "core" / "arrays.py"]


# ---------------------------------------------------------------------------------- ceilings


def test_no_parameter_is_an_anonymous_tuple():
    """A record has names for its parts."""
    assert not counts.tuple_parameters()


def test_no_record_is_read_by_position():
    assert not counts.record_slices()


def test_no_line_assigns_a_tuple_to_a_tuple():
    """One thought per line."""
    assert not counts.tuple_assignments()


def test_no_module_imports_more_than_25_names():
    assert not counts.crowded_imports(25)


def test_functions_have_at_most_7_parameters_and_public_ones_at_most_10():
    assert not counts.long_signatures(private=7, public=10)


def test_no_class_name_is_used_for_two_things():
    assert not counts.repeated_classes()


def test_no_function_is_named_of():
    """Functions are verbs: `read_rate`, not `reward_rate`."""
    assert not counts.functions_named_of()


def test_things_are_not_persons():
    """No nobody, whoever, somebody or told."""
    assert not counts.persons()


def test_the_package_has_at_most_45_public_names():
    assert len(public_names.TOP) <= 45


def test_the_command_line_has_at_most_13_commands_and_110_options():
    options = public_names.options_of_commands()
    assert 1 <= len(options) <= 13, sorted(options)
    assert 1 <= sum(map(len, options.values())) <= 110, {
        name: len(o) for name, o in options.items()
    }


@pytest.mark.parametrize("folder", ["examples", "docs"])
def test_examples_and_docs_import_public_names_only(folder):
    assert not public_names.private_imports(folder)


# ------------------------------------------------------------------ one concept, one place

NATIVE = (".hpp", ".cuh", ".cu", ".cpp")
ONE_PLACE = {  # a pattern that only the definition matches, and where it is
    "one step of the theorem": (r"\ndef add_step\(", (".py",), "core/theorem.py"),
    "the lattice's drift in JAX": (r"-1j \* \(\w+ \* psi", (".py",), "tcmt/drift.py"),
    "the lattice's drift in C++": (
        r"omega \* yi \+ hi",
        (".hpp", ".cpp"),
        "tcmt/native/cpu/drift.hpp",
    ),
    "the lattice's drift in CUDA": (
        r"omega \* y\.y \+ h\.y",
        (".cuh", ".cu"),
        "tcmt/native/cuda/drift.cuh",
    ),
    "mean and standard error": (r"ddof=1\)\s*/ j?np\.sqrt\(", (".py",), "core/estimate.py"),
    "fit of a drift": (r"\ndef fit_drift\(", (".py",), "core/likelihood/drift.py"),
    "evidence about unknowns": (r"\nclass Evidence\b", (".py",), "core/likelihood/evidence.py"),
    "tests of residuals": (r"\ndef sum_families\(", (".py",), "core/likelihood/alternatives.py"),
    "from a setting to a parameter": (
        r"self\.offset \+ self\.gain",
        (".py",),
        "learn/effective.py",
    ),
    "a training": (r"\nclass Training\b", (".py",), "learn/training.py"),
    "the loop into a folder": (r"\ndef iterate\(", (".py",), "store/loop.py"),
    "pieces of trajectories": (r"x\.shape\[1\] \* x\.shape", (".py",), "core/trajectories.py"),
    "an estimate of files": (r"\.chunked_samples\(", (".py",), "insitu/chunk_sums.py"),
    "counter-based noise in C++": ("0xD2511F53", NATIVE, "compiled/native/common/philox.hpp"),
    "counter-based noise in JAX": ("(?i)0xD2511F53", (".py",), "core/draws.py"),
    "vectors of numbers": (r"#define VECTOR\(", NATIVE, "compiled/native/common/vectors.hpp"),
    "polynomials": ("7.0376836292e-2f", NATIVE, "compiled/native/common/polynomials.hpp"),
    "defaults of an estimator": (r"\nclass PlainEstimator\b", (".py",), "core/protocols.py"),
}


@pytest.mark.parametrize("concept", ONE_PLACE)
def test_one_concept_has_one_place(concept):
    pattern, suffixes, home = ONE_PLACE[concept]
    places = counts.modules_with(pattern, suffixes)
    assert places == [home]
