"""Fingerprints of functions: equal where they compute the same, whatever process or variable
names; else different.
"""

import functools
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fluctua as fl
from fluctua.store import fingerprint
from fluctua.store.fingerprint import as_shapes, compare, describe, versions
from fluctua.store.parts import describe_estimator, describe_optimiser
from processes import environment_to_die_in

THETA = {"k": jnp.ones(2)}
SHAPES = as_shapes((THETA, jnp.ones(2)))
GAIN = 2.0


def drift(theta, x):
    return -theta["k"] * x * GAIN


def with_other_names(parameters, state):
    """As `drift` in other words."""
    rate = jnp.negative(parameters["k"])
    return functools.reduce(jnp.multiply, [rate, state, 2.0])


@jax.custom_jvp
def root(x):
    return jnp.sqrt(x)


root.defjvps(lambda tangent, answer, x: 0.5 * tangent / answer)


def test_a_traced_function_is_known_by_what_it_computes(monkeypatch):
    one = describe(drift, *SHAPES)
    assert one.startswith(fingerprint.TRACED)
    assert describe(lambda p, y: -p["k"] * y * 2.0, *SHAPES) == one
    assert describe(jax.jit(lambda p, y: root(p["k"]) * y), *SHAPES) == describe(
        jax.jit(lambda th, x: root(th["k"]) * x), *SHAPES
    )
    different = {
        describe(function, *SHAPES)
        for function in (
            lambda p, y: -p["k"] * y * 2.1,
            lambda p, y: p["k"] * y * 2.0,
            lambda p, y: -p["k"] * y * 2.0 + jnp.array([0.0, 1e-9]),
            lambda p, y: -p["k"] * y * 2.0 + jnp.array([0.0, 2e-9]),
            lambda p, y: jnp.where(y > 1, 0.0, -p["k"] * y * 2.0),
            lambda p, y: jnp.where(y > 2, 0.0, -p["k"] * y * 2.0),
        )
    }
    assert len(different | {one}) == 7
    monkeypatch.setitem(globals(), "GAIN", 2.5)  # a constant that is not in its text
    assert describe(drift, *SHAPES) != one


def count_calls(start):
    calls = start

    def estimator(key, theta, count):
        nonlocal calls
        calls += 1
        return GAIN * float(np.sum(theta["k"]))  # cannot be traced

    return estimator


def note_calls(calls):
    return lambda key, theta, count: calls.append(float(theta))


def read_from(settings):
    return lambda key, theta, count: settings["gain"] * float(theta)


def test_other_functions_are_known_by_their_code(monkeypatch):
    one = describe(count_calls(0))
    assert one.startswith(fingerprint.CODE)
    used = count_calls(0)
    for _ in range(3):
        used(None, THETA, 1)
    assert describe(used) == one  # what it counts itself is memory, not configuration
    assert describe(note_calls([])) == describe(note_calls([1, 2]))
    assert describe(read_from({"gain": 1})) != describe(read_from({"gain": 2}))
    scaled = lambda factor: lambda key, theta, count: factor * float(theta)
    assert describe(scaled(2.0)) == describe(scaled(2.0)) != describe(scaled(2.1))
    assert describe(functools.partial(scaled, 1)) != describe(functools.partial(scaled, 2))
    assert describe(lambda v: float(v) + 1) != describe(lambda v: float(v) + 2)
    monkeypatch.setitem(globals(), "GAIN", 2.5)
    assert describe(count_calls(0)) != one


def test_optimisers_are_known_by_their_numbers():
    rules = (
        optax.adam(0.1),
        optax.adam(0.2),
        optax.adam(0.1, b1=0.8),
        optax.sgd(0.1),
        optax.sgd(0.1, momentum=0.9),
        optax.adam(optax.cosine_decay_schedule(0.1, 100)),
        optax.adam(optax.cosine_decay_schedule(0.1, 200)),
        optax.inject_hyperparams(optax.adam)(0.1),
        optax.inject_hyperparams(optax.adam)(0.2),
        fl.optimisers.rms_ascent(0.1),
        fl.optimisers.rms_ascent(0.2),
        fl.optimisers.kl_ascent(0.1),
        fl.optimisers.kl_ascent(0.2),
        optax.chain(optax.clip(1.0), optax.adam(0.1)),
    )
    lines = [describe_optimiser(rule, THETA) for rule in rules]
    assert len(set(lines)) == len(lines)
    assert all(line.startswith(fingerprint.TRACED) for line in lines)
    assert describe_optimiser(optax.adam(0.1), THETA) == lines[0]

    def descend(rate):
        update = lambda gradient, state, theta=None: (
            jax.tree.map(lambda g: -rate * float(g), gradient),
            state,
        )
        return optax.GradientTransformation(lambda theta: (), update)

    own = [describe_optimiser(descend(rate), THETA) for rate in (0.1, 0.1, 0.2)]
    assert own[0] == own[1] != own[2]
    assert own[0].startswith(fingerprint.CODE)


def make_parts(**changes):
    choices = {
        "drift": drift,
        "noise": 0.3,
        "reward": 1.0,
        "steps": 5,
        "start": 1.0,
        "baseline": "time",
    } | changes
    process = fl.Process(choices["drift"], lambda theta, x: choices["noise"] * jnp.ones(2))
    objective = fl.Objective(terminal=lambda theta, x: -((x[0] - choices["reward"]) ** 2))
    substrate = fl.simulator(
        process, choices["start"] * jnp.ones(2), jnp.linspace(0, 1, choices["steps"])
    )
    return describe_estimator(
        fl.ppgt(substrate, objective, process=process, baseline=choices["baseline"]), THETA
    )


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        ({"drift": with_other_names}, set()),
        ({"drift": lambda theta, x: -x}, {"process.drift"}),
        ({"noise": 0.31}, {"process.noise"}),
        ({"reward": 1.1}, {"objective.terminal"}),
        ({"steps": 6}, {"times"}),
        ({"start": 1.1}, {"start"}),
        (
            {"baseline": "mean"},
            {"baseline", "baseline.name", "initial_baseline", "initial_baseline.name"},
        ),
        ({"baseline": fl.baselines.time_only(pilot=64)}, {"baseline", "initial_baseline"}),
    ],
)
def test_what_changed_in_an_estimator_is_named(change, parts):
    assert set(compare(make_parts(), versions(), make_parts(**change)).changed) == parts


def test_what_an_estimator_remembers_is_not_part_of_it():
    process = fl.Process(drift, lambda theta, x: 0.3 * jnp.ones(2))
    objective = fl.Objective(terminal=lambda theta, x: x[0])
    substrate = fl.simulator(process, jnp.ones(2), jnp.linspace(0, 1, 5))
    weighted = fl.ShrunkCorrection(
        fl.ppgt(substrate, objective, process=process, baseline=fl.Twin()), forget_after=5
    )
    fresh = describe_estimator(weighted, THETA)
    weighted(jax.random.key(0), THETA, 8)
    assert weighted.state
    assert describe_estimator(weighted, THETA) == fresh
    other = describe_estimator(fl.ShrunkCorrection(weighted.estimator, forget_after=6), THETA)
    assert compare(fresh, versions(), other).changed == ["ShrunkCorrection.forget_after"]


def test_other_versions_leave_functions_undecided_but_not_numbers():
    now, then = make_parts(), make_parts(drift=lambda theta, x: -x, start=1.1)
    older = versions() | {"jax": "0.0.1"}
    differences = compare(then, older, now)
    assert differences.changed == ["start"]
    assert differences.unsure == ["process.drift"]
    assert differences.versions == [f"jax 0.0.1 → {jax.__version__}"]
    assert compare(now, older, now) == ([], [], differences.versions)


PROGRAM = """
import jax.numpy as jnp
import optax
import fluctua as fl
from fluctua.core.protocols import as_estimator
from fluctua.learn.training import Bounds
from fluctua.store.parts import describe_training

weights = {name: 0.1 * jnp.arange(2.0) for name in {"some", "names", "in", "a", "set"}}
drift = lambda theta, x: -theta * x + sum(weights.values())
process = fl.Process(drift, lambda theta, x: jnp.ones(2))
jumps = fl.Jumps(lambda theta, x: jnp.exp(theta) * x, [[1.0, 0.0], [0.0, -1.0]], diffusion=process)
for one in (process, jumps):
    substrate = fl.simulator(one, jnp.ones(2), jnp.linspace(0, 1, 5))
    objective = fl.Objective(terminal=lambda theta, x: x[0])
    estimator = fl.ppgt(substrate, objective, process=one, baseline="mean")
    def own(key, theta, count, estimator=estimator):
        return estimator(key, theta, int(count) if count in {4, 8} else 4)
    for subject in (estimator, fl.natural(estimator), own):
        rule = optax.adam(optax.cosine_decay_schedule(0.1, 9))
        print(describe_training(as_estimator(subject), jnp.ones(2), rule, Bounds(0.0, 2.0).project))
"""


@pytest.mark.long
def test_fingerprints_are_the_same_in_every_process(tmp_path):
    def start(seed):
        environment = environment_to_die_in(tmp_path, PYTHONHASHSEED=str(seed))
        return subprocess.Popen(
            [sys.executable, "-c", PROGRAM], env=environment, stdout=subprocess.PIPE, text=True
        )

    first, second = (process.communicate()[0] for process in [start(1), start(2)])
    assert first.count("traced") > 20
    assert second == first
