"""Programs by NumPy give what JAX computes, and refuse what they have no rule for."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fluctua import Objective, Process, ppgt, simulator
from fluctua.core import diffusion
from fluctua.core.host.programs import HostProgram, NoRule

X = jnp.array([0.3, -1.2, 2.5])
W = jnp.array([[1.0, 0.5, -0.25], [0.0, 2.0, 1.5]])

FUNCTIONS = {
    "waves": lambda x, w: jnp.sin(x) * jnp.cos(x) + jnp.tan(x) - jnp.tanh(x),
    "powers": lambda x, w: x**2 + x**-3 + jnp.abs(x) ** 0.7 + jnp.cbrt(x),
    "roots": lambda x, w: jnp.sqrt(jnp.abs(x)) + jax.lax.rsqrt(jnp.abs(x)),
    "exponentials": lambda x, w: jnp.exp(x) + jnp.expm1(x) + jnp.log1p(x**2) + jnp.log(x**2),
    "hyperbolic": lambda x, w: jnp.sinh(x) / jnp.cosh(x),
    "sigmoid": lambda x, w: jax.nn.sigmoid(x) + jax.nn.relu(x) + jnp.arctan2(x, 1 + x**2),
    "choices": lambda x, w: jnp.where((x > 0) & ~(x > 2) | (x <= -1), x, -x),
    "clipped": lambda x, w: jnp.clip(x, -1, 1) + jnp.maximum(x, 0) + jnp.minimum(x, 1),
    "product": lambda x, w: w @ x,
    "batched product": lambda x, w: jnp.einsum("ij,ik->jk", w, w) @ x,
    "sums": lambda x, w: jnp.sum(w, axis=0) + jnp.mean(x) + jnp.sum(w),
    "pieces": lambda x, w: jnp.concatenate([x[1:], x[:1], w[0]])[::-1].reshape(2, 3).T,
    "index": lambda x, w: x * jnp.arange(3) + jnp.ones(3, int),
    "unpacked": lambda x, w: jnp.array([x[0], 2.0, -x[2]]),
    "batched": lambda x, w: jax.vmap(lambda row: row @ x + jnp.roll(row, 1))(w),
    "types": lambda x, w: x.astype(jnp.float32) + jnp.sign(x).astype(int),
    "rows by name": lambda x, w: (lambda first, second: first - 2 * second)(*w),
    "rows split": lambda x, w: jnp.split(w, 2)[1] + jnp.split(x, [1, 2])[2],
    "columns first": lambda x, w: w.ravel(order="F") * w.reshape(6),
    "a compiled part": lambda x, w: jax.jit(lambda v: 2 * v)(x),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_numpy_computes_what_jax_does(name):
    function = FUNCTIONS[name]
    expected = function(X, W)
    (found,) = HostProgram(function, X, W)(X, W)
    assert found.dtype == expected.dtype
    np.testing.assert_allclose(found, expected, rtol=1e-6 if name == "types" else 1e-13)


EDGES = np.array([np.nan, np.inf, -np.inf, 3e9, -3e9, -1.7, 0.0])
COUNTS = np.array([0, 1, -7, 7, -(2**31)], np.int32)


@pytest.mark.parametrize("kind", [np.int8, np.int32, np.uint32])
def test_reals_outside_of_an_integer_type_are_those_of_jax(kind):
    def convert(x):
        return x.astype(kind)

    (found,) = HostProgram(convert, EDGES)(EDGES)
    np.testing.assert_array_equal(found, convert(jnp.asarray(EDGES)))


@pytest.mark.parametrize("by", [0, 2, -2, -1])
def test_integers_are_divided_as_jax_does(by):
    divisor = np.full_like(COUNTS, by)
    (found,) = HostProgram(jax.lax.div, COUNTS, divisor)(COUNTS, divisor)
    np.testing.assert_array_equal(found, jax.lax.div(jnp.asarray(COUNTS), jnp.asarray(divisor)))


@pytest.mark.parametrize("kind", [jnp.float16, jnp.bfloat16])
def test_products_are_added_in_the_precision_of_the_result(kind):
    def multiply(x):
        return jnp.matmul(x, x, preferred_element_type=jnp.float32)

    x = np.full((4, 4), 200).astype(kind)
    (found,) = HostProgram(multiply, x)(x)
    np.testing.assert_array_equal(found, np.full((4, 4), 160_000, np.float32))


def test_operations_without_a_rule_are_refused():
    with pytest.raises(NoRule, match="sort"):
        HostProgram(jnp.sort, X)(X)


def test_outputs_that_an_argument_moves_are_marked():
    program = HostProgram(lambda x, k: (x * jnp.array([1.0, 0.0, 1.0]), k * x[0]), X, 2.0)
    by_x, by_x_too = program.mark_dependent(True, False)
    np.testing.assert_array_equal(by_x, [True, False, True])
    assert by_x_too
    assert not program.mark_dependent(False, True)[0].any()


def test_marks_follow_elements_that_are_counted_by_columns():
    program = HostProgram(lambda x, y: jnp.stack([x, y]).ravel(order="F"), X, X)
    np.testing.assert_array_equal(program.mark_dependent(True, False)[0], [True, False] * 3)


# ------------------------------------------------------------------- checks before an estimate

THETA = {"k": jnp.array(2.0), "s": jnp.array(0.4)}
PROCESSES = {
    "regular": Process(lambda th, x: -th["k"] * x, lambda th, x: th["s"] * jnp.ones(2)),
    "noiseless": Process(
        lambda th, x: jnp.array([x[1], -th["k"] * x[0]]), lambda th, x: jnp.array([0.0, th["s"]])
    ),
    "moved without noise": Process(
        lambda th, x: jnp.array([th["k"] * x[1], -x[0]]), lambda th, x: jnp.array([0.0, th["s"]])
    ),
    "noise that comes": Process(
        lambda th, x: -x, lambda th, x: jnp.array([jnp.abs(x[1]), th["s"]])
    ),
    "not finite": Process(lambda th, x: -x / x[1], lambda th, x: th["s"] * jnp.ones(2)),
    "tiny": Process(lambda th, x: -x, lambda th, x: jnp.array([1e-155, 1.0])),
    "no rule": Process(lambda th, x: -jnp.sort(x), lambda th, x: th["s"] * jnp.ones(2)),
}


def check_on_host(process, theta=THETA):
    arguments = theta, jnp.array([[1.0, 0.0]]), jnp.linspace(0, 1, 3), None
    complete = Process(
        lambda th, x, t, c: process.drift(th, x), lambda th, x, t, c: process.noise(th, x)
    )
    quick = [int(v) for v in diffusion.check_quickly(complete, *arguments)]
    return diffusion.check_on_host(complete, *arguments), quick


@pytest.mark.parametrize("name", PROCESSES)
def test_a_check_by_numpy_passes_only_where_the_compiled_one_does(name):
    found, (*noiseless, regular) = check_on_host(PROCESSES[name])
    assert (found is not None) == (name in ("regular", "noiseless"))
    if found is not None:
        assert regular
        np.testing.assert_array_equal(found, noiseless)


def test_parameters_that_are_not_finite_are_left_to_the_compiled_check():
    found, (*_, regular) = check_on_host(
        PROCESSES["regular"], THETA | {"unused": jnp.array(jnp.nan)}
    )
    assert found is None
    assert not regular


def test_an_estimate_compiles_no_check(monkeypatch):
    monkeypatch.setattr(diffusion, "check_quickly", lambda *arguments: pytest.fail("compiled"))
    run = simulator(PROCESSES["noiseless"], jnp.array([1.0, 0.0]), jnp.linspace(0, 1, 3))
    estimator = ppgt(run, Objective(terminal=lambda th, x: x[0]))
    assert np.isfinite(estimator(jax.random.key(0), THETA, 4).value)
