"""Kernels of earlier processes are found again, and never for another process."""

import json
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fluctua as fl
from fluctua.compiled import cpu, identity, kernels, saved, trace
from fluctua.core import scores
from fluctua.core.draws import no_noise, philox

pytestmark = pytest.mark.skipif(cpu.find_compiler() is None, reason="needs a C++ compiler")

THETA = {"k": jnp.array(2.0), "s": jnp.array(0.4)}
T = jnp.linspace(0, 1, 6)
START = jnp.array([1.0, 0.5])
GLOBAL = 1.0


def drift(theta, x, t, context):
    return -theta["k"] * x


def drift_with_global(theta, x):
    return -theta["k"] * x * GLOBAL


def drift_with_default(theta, x, stiff=2.0):
    return -theta["k"] * stiff * x


def bind_drift(factor):
    """A drift with a constant in its closure."""
    return lambda theta, x: -theta["k"] * factor * x


def noise(theta, x, t, context):
    return theta["s"] * jnp.ones(2)


def reward(theta, x, t):
    return x[0] ** 2


def make_estimator(
    drift=drift, noise=noise, integrator="euler", start=START, t=T, wiener=None, **choices
):
    process = fl.Process(drift, noise, integrator=integrator)
    options = {} if wiener is None else {"wiener": wiener}
    objective = choices.pop("objective", fl.Objective(running=reward))
    choices = {"baseline": "none"} | choices  # a pilot would be one more program for JAX
    run = partial(fl.simulator, process, start, t, **options)
    return lambda backend: fl.ppgt(run(backend=backend), objective, **choices)


@pytest.fixture
def traced(monkeypatch, tmp_path):
    """A folder without kernels; counts the processes that are traced as a whole."""
    yield from count_traced(monkeypatch, tmp_path)


@pytest.fixture(scope="module")
def filled_folder(tmp_path_factory):
    """A folder for the kernels of several tests."""
    return tmp_path_factory.mktemp("filled")


@pytest.fixture
def traced_beside_others(monkeypatch, filled_folder):
    """A folder with the kernel of the plain process, and with those of tests before."""
    counting = count_traced(monkeypatch, filled_folder)
    count = next(counting)
    if not [*filled_folder.glob("*.json")]:
        sample_with_kernel(make_estimator())
    count.clear()
    yield count
    yield from counting


def count_traced(monkeypatch, folder):
    monkeypatch.setenv("FLUCTUA_KERNELS", str(folder))
    monkeypatch.setattr(kernels, "OPTIMISE", "-O0")
    count = []
    original = trace.trace_step

    def trace_step(*arguments):
        count.append(1)
        return original(*arguments)

    monkeypatch.setattr(trace, "trace_step", trace_step)
    forget()
    yield count
    forget()


def forget():
    """Make the process as good as new: kernels are on disk alone."""
    kernels.KERNELS.clear()
    kernels.make_kernel.cache_clear()


def sample_with_kernel(estimator, theta=THETA):
    forget()
    return estimator("cpu").samples(jax.random.key(1), theta, 20)


def compare_with_jax(estimator, theta=THETA, reference=None):
    """Gradients and returns of a kernel are those of JAX on the same noise, where `reference`
    may be another process of the same numbers.
    """
    found = sample_with_kernel(estimator, theta)
    expected = (reference or estimator)("jax").samples(jax.random.key(1), theta, 20)
    leaves = jax.tree.leaves(found)
    coarse = any(leaf.dtype == np.float32 for leaf in leaves)
    tolerance = {"rtol": 1e-4, "atol": 1e-5} if coarse else {"rtol": 1e-9, "atol": 1e-12}
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, **tolerance), found, expected)


class Named(Exception):
    """The name of a kernel, in place of the kernel."""


@pytest.fixture
def name_kernel(monkeypatch):
    """A function that returns the name under which a kernel would be saved; nothing is compiled."""

    def stop(key, build):
        raise Named(key.identify())

    def name(estimator, theta=THETA):
        forget()
        with monkeypatch.context() as patch:
            patch.setattr(kernels, "make_kernel", stop)
            with pytest.raises(Named) as named:
                estimator("cpu").samples(jax.random.key(1), theta, 20)
        return named.value.args[0]

    return name


def test_a_process_that_was_compiled_is_not_traced_again(traced):
    compare_with_jax(make_estimator())
    assert len(traced) == 1
    compare_with_jax(make_estimator())
    as_good = make_estimator(lambda theta, x: -theta["k"] * x)
    compare_with_jax(as_good, reference=make_estimator())
    assert len(traced) == 1


def test_numbers_of_parameters_and_times_may_change(traced):
    compare_with_jax(make_estimator())
    theta = {"k": jnp.array(1.0), "s": jnp.array(0.7)}
    compare_with_jax(make_estimator(t=jnp.linspace(0, 2, 9), start=jnp.array([0.1, 0.2])), theta)
    assert len(traced) == 1


CHANGES = {
    "integrator": {"integrator": "heun"},
    "score": {"score": scores.drift_score},
    "noise": {"noise": lambda theta, x: theta["s"] * jnp.array([1.0, 2.0])},
    "dependence on time": {"drift": lambda theta, x, t: -theta["k"] * x + t},
    "reward": {"objective": fl.Objective(running=lambda theta, x: x[1] ** 2)},
    "terminal reward": {"objective": fl.Objective(running=reward, terminal=lambda th, x: x[0])},
    "reward of steps": {
        "objective": fl.Objective(running=reward, per_step=lambda th, x, y: x[0] * y[1])
    },
    "initial reward": {"objective": fl.Objective(running=reward, initial=lambda th, x: x[0])},
    "stop": {"objective": fl.Objective(running=reward, stop=lambda th, x: x[0] - 1.2)},
    "bridge": {
        "objective": fl.Objective(running=reward, stop=lambda th, x: x[0] - 1.2, overshoot="bridge")
    },
    "weighted baseline": {"baseline": "optimal"},
    "generator": {"wiener": philox},
    "no noise": {"wiener": no_noise},
    "float32 state": {"start": START.astype(jnp.float32)},
    "size of the state": {
        "start": jnp.ones(3),
        "noise": lambda theta, x: theta["s"] * jnp.ones(3),
    },
}


def test_a_changed_process_has_another_name(name_kernel):
    names = [name_kernel(make_estimator())]
    names += [name_kernel(make_estimator(**change)) for change in CHANGES.values()]
    assert len({*names}) == len(CHANGES) + 1
    assert None not in names
    assert name_kernel(make_estimator()) == names[0]


@pytest.mark.long
@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_process_gets_a_kernel_of_its_own(change, traced_beside_others):
    for _ in range(2):  # made, and found again
        compare_with_jax(make_estimator(**CHANGES[change]))
        assert len(traced_beside_others) == 1


def test_the_level_of_a_stop_counts(name_kernel):
    def stop_at(level):
        return fl.Objective(running=reward, stop=lambda th, x: x[0] - level)

    estimators = [make_estimator(objective=stop_at(level)) for level in (1.2, 1.05, 1.2)]
    first, second, third = map(name_kernel, estimators)
    assert first == third != second


def test_constants_of_closures_count(traced):
    sample_with_kernel(make_estimator(bind_drift(1.5)))
    compare_with_jax(make_estimator(bind_drift(1.5 + 1e-7)))
    assert len(traced) == 2


def test_arrays_in_closures_count(name_kernel):
    arrays = [jnp.array([1.5, 2.0]), jnp.array([1.5, 2.5]), np.array([1.5, 2.0])]
    first, second, third = (name_kernel(make_estimator(bind_drift(array))) for array in arrays)
    assert first == third != second


def test_default_arguments_count(name_kernel, monkeypatch):
    first = name_kernel(make_estimator(drift_with_default))
    monkeypatch.setattr(drift_with_default, "__defaults__", (3.0,))
    assert name_kernel(make_estimator(drift_with_default)) != first


def test_globals_count(traced, monkeypatch):
    sample_with_kernel(make_estimator(lambda theta, x: drift_with_global(theta, x)))
    monkeypatch.setitem(globals(), "GLOBAL", 1.25)
    compare_with_jax(make_estimator(lambda theta, x: drift_with_global(theta, x)))
    assert len(traced) == 2


def test_structure_and_types_of_theta_and_time_count(name_kernel):
    names = [name_kernel(make_estimator())]
    names.append(name_kernel(make_estimator(), THETA | {"unused": jnp.array([1.0, 2.0])}))
    single = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), THETA)
    names.append(name_kernel(make_estimator(), single))
    with jax.enable_x64(False):
        theta = {name: jnp.asarray(leaf, jnp.float32) for name, leaf in THETA.items()}
        times = jnp.linspace(0, 1, 6, dtype=jnp.float32)
        start = jnp.array([1.0, 0.5], jnp.float32)
        names.append(name_kernel(make_estimator(start=start, t=times), theta))
    assert len({*names}) == 4


def test_a_function_with_a_derivative_of_its_own_has_no_name(name_kernel):
    @jax.custom_jvp
    def clipped(x):
        return jnp.minimum(x, 1.0)

    clipped.defjvp(lambda x, dx: (clipped(*x), 0.5 * dx[0]))
    assert name_kernel(make_estimator(lambda theta, x: -clipped(theta["k"] * x))) is None


@pytest.mark.parametrize(
    "choices",
    [
        {"score": lambda process, theta, step: scores.full_score(process, theta, step)},
        {"integrator": lambda drift, theta, x, t, dt, context: drift(theta, x, t, context)},
        {
            "noise": lambda theta, x: theta["s"] * jnp.eye(2),
            "start": fl.Reparameterised(lambda theta: theta["k"] * jnp.ones(2)),
        },
    ],
    ids=["score", "integrator", "start"],
)
def test_functions_that_the_library_calls_in_other_ways_have_no_name(choices, name_kernel):
    assert name_kernel(make_estimator(**choices)) is None


def test_other_versions_settings_and_compilers_count(name_kernel, monkeypatch):
    names = [name_kernel(make_estimator())]
    monkeypatch.setattr(identity, "FORMAT", 10**6)
    names.append(name_kernel(make_estimator()))
    monkeypatch.setattr(identity, "_describe_library", lambda: ["another state of the library"])
    names.append(name_kernel(make_estimator()))
    monkeypatch.setattr(kernels, "OPTIMISE", "-O3")
    names.append(name_kernel(make_estimator()))
    monkeypatch.setattr(cpu, "describe_compiler", lambda: ["another compiler"])
    names.append(name_kernel(make_estimator()))
    jax.config.update("jax_numpy_rank_promotion", "warn")
    try:
        names.append(name_kernel(make_estimator()))
    finally:
        jax.config.update("jax_numpy_rank_promotion", "allow")
    assert len({*names}) == 6


def test_the_files_of_the_library_count():
    lines = identity._describe_library()
    for name in ("scores.py", "emit.py", "sweep.hpp", "jumps.py"):
        assert any(f" {name} " in line for line in lines)


def test_files_that_were_changed_are_made_again(traced, tmp_path):
    compare_with_jax(make_estimator())
    (description,) = tmp_path.glob("*.json")
    library = tmp_path / json.loads(description.read_text())["library"]

    def rewrite(path, content):
        path.unlink()  # a library that is loaded must keep its content
        path.write_bytes(content)
        path.chmod(0o700)

    harms = [
        lambda: rewrite(description, description.read_bytes().replace(b"theta", b"x")),
        lambda: description.with_suffix(".sha256").write_text("0" * 64),
        lambda: description.chmod(0o666),
        lambda: rewrite(library, library.read_bytes() + b"more"),
        library.unlink,
    ]
    for count, harm in enumerate(harms, 2):
        harm()
        compare_with_jax(make_estimator())
        assert len(traced) == count
        compare_with_jax(make_estimator())
        assert len(traced) == count


def test_a_saved_program_is_the_same(traced):
    compare_with_jax(make_estimator())
    (made,) = kernels.KERNELS.values()
    forget()
    make_estimator()("cpu").samples(jax.random.key(0), THETA, 3)
    (loaded,) = kernels.KERNELS.values()
    assert len(traced) == 1
    assert loaded.layout == made.layout
    for found, expected in zip(loaded.program[1:], made.program[1:], strict=True):
        assert found == (list(expected) if isinstance(expected, tuple) else expected)
    assert loaded.program.graph.args == made.program.graph.args
    assert loaded.program.graph.depends == made.program.graph.depends
    assert loaded.program.graph.ops == made.program.graph.ops


def test_numbers_that_jax_computes_are_not_saved(traced, tmp_path):
    def matrix_drift(theta, x):
        return -jnp.linalg.eigvalsh(jnp.diag(theta["k"] * jnp.array([1.0, 2.0]))) * x

    for _ in range(2):
        compare_with_jax(make_estimator(matrix_drift))
    assert len(traced) == 2
    assert not [*tmp_path.glob("*.json")]


def test_nothing_is_saved_where_the_folder_is_not_writable(traced, monkeypatch):
    def refuse(*arguments, **options):
        raise OSError("no space")

    estimator = make_estimator()
    compare_with_jax(estimator)
    monkeypatch.setattr(saved.tempfile, "TemporaryDirectory", refuse)
    monkeypatch.setattr(identity, "FORMAT", 10**6)
    compare_with_jax(estimator)
    assert len(traced) == 2
