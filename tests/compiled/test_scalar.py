"""Programs of scalars have the values of the functions they were traced from."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fluctua.compiled.graph import Graph
from fluctua.compiled.scalar import Unsupported, _scalarise_equation, scalarise

ARRAY = st.lists(st.floats(-2, 2, allow_subnormal=False), min_size=3, max_size=3).map(np.array)
UNARY = [
    jnp.sin,
    jnp.cos,
    jnp.tanh,
    jnp.exp,
    jnp.abs,
    jnp.negative,
    jnp.floor,
    jnp.sign,
    jnp.square,
    jnp.flip,
    jnp.cumsum,
    lambda v: jnp.log(1 + v**2),
    lambda v: jnp.sqrt(jnp.abs(v)),
    lambda v: v[::-1] - v[0],
    lambda v: v / (2 + v**2),
    lambda v: jnp.where(v > 0, v, 2 * v),
    lambda v: jnp.max(v) - v,
    lambda v: jnp.clip(v, -1, 0.5),
    lambda v: jnp.abs(jnp.exp(1j * v) * (v[0] + 2j) / (3 - 1j * v)),
    lambda v: jnp.outer(v, v) @ v,
    lambda v: v.at[1].add(v[0]),
    lambda v: jnp.roll(v, 1),
    lambda v: v**3,
    jax.nn.softplus,
    jax.nn.relu,
    lambda v: jax.lax.fori_loop(0, 3, lambda k, w: w * 0.5 + v[k], v),
    lambda v: jax.lax.cond(v[0] > 0, lambda w: w + 1, lambda w: -w, v),
]
BINARY = [
    jnp.add,
    jnp.subtract,
    jnp.multiply,
    jnp.maximum,
    jnp.minimum,
    # off the branch cut: rewriting does not keep the sign of a zero
    lambda a, b: jnp.arctan2(1 + a**2, b),
    jnp.hypot,
    lambda a, b: a / (1 + b**2),
    lambda a, b: jnp.where(a < b, a, b),
    lambda a, b: jnp.full(3, a @ b),
]


def expressions():
    """Functions of (theta, x), as trees of the operations above."""
    leaf = st.sampled_from(
        [lambda theta, x: theta, lambda theta, x: x, lambda theta, x: jnp.full(3, 0.7)]
    )
    one = lambda f, a: lambda theta, x: f(a(theta, x))
    two = lambda f, a, b: lambda theta, x: f(a(theta, x), b(theta, x))
    grow = lambda inner: st.one_of(
        st.builds(one, st.sampled_from(UNARY), inner),
        st.builds(two, st.sampled_from(BINARY), inner, inner),
    )
    return st.recursive(leaf, grow, max_leaves=6)


def values(function, theta, x):
    """What the scalars of a function come to."""
    graph = Graph()
    leaves = [np.array([graph.leaf(kind, k) for k in range(3)]) for kind in ("theta", "x")]
    (ids,) = scalarise(graph, jax.make_jaxpr(function)(theta, x), leaves)
    numbers = {"theta": theta, "x": x}
    found = graph.evaluate(ids.ravel().tolist(), lambda kind, index: numbers[kind][index])
    return np.array([float(v) for v in found]).reshape(ids.shape)


@settings(max_examples=40)
@given(expressions(), ARRAY, ARRAY)
def test_random_expressions_and_their_slopes(expression, theta, x):
    with jax.enable_x64(True):
        total = lambda theta, x: jnp.sum(expression(theta, x))
        slope = jax.grad(total, argnums=1)
        for function in (expression, slope):
            exact = np.asarray(function(jnp.asarray(theta), jnp.asarray(x)))
            size = max(1.0, np.abs(exact[np.isfinite(exact)]).max(initial=0))
            found = values(function, theta, x)
            both = np.isfinite(exact) & np.isfinite(found)  # 0·∞ may have been simplified away
            np.testing.assert_allclose(found[both], exact[both], rtol=0, atol=1e-10 * size)
            assert not (np.isfinite(exact) & ~np.isfinite(found)).any()


@pytest.mark.parametrize(
    "function",
    [
        lambda theta, x: jnp.linalg.solve(jnp.outer(x, theta) + jnp.diag(x), theta),
        lambda theta, x: jnp.linalg.cholesky(jnp.outer(x, x) + jnp.eye(3)),
        lambda theta, x: (
            jnp.interp(theta, jnp.linspace(-1, 1, 5), jnp.arange(5.0)) * x
        ),  # of θ alone: left to JAX
        lambda theta, x: jnp.linalg.eigh(jnp.outer(theta, theta) + jnp.eye(3))[0] * x,
        lambda theta, x: x[jnp.argmax(theta) * 0] + jnp.argmax(x),
    ],
)
def test_small_linear_algebra_and_what_is_left_to_jax(function):
    theta, x = np.array([0.3, -0.8, 0.5]), np.array([0.2, 1.4, -0.7])
    with jax.enable_x64(True):
        np.testing.assert_allclose(values(function, theta, x), function(theta, x), atol=1e-12)


@pytest.mark.parametrize("sign", [1, -1])
def test_atan2_of_a_difference_that_is_zero(sign):
    """0 − 0 is +0 and atan2(0, +0) is 0; the shared node of the other difference has −0."""
    zeros = np.zeros(3)
    function = lambda theta, x: jnp.arctan2(theta, x - theta if sign > 0 else theta - x)
    with jax.enable_x64(True):
        np.testing.assert_array_equal(values(function, zeros, zeros), function(zeros, zeros))


def test_what_no_kernel_is_made_for_is_named():
    for function, primitive in [
        (lambda theta, x: jnp.sort(x), "sort"),
        (lambda theta, x: theta[jnp.floor(x).astype(int)], "gather"),
        (lambda theta, x: jax.lax.while_loop(lambda v: v[0] > 0, lambda v: v - 1, x), "while"),
        (lambda theta, x: jnp.real(jnp.sqrt(x + 1j * theta)), "sqrt"),  # of complex numbers
    ]:
        with pytest.raises(Unsupported) as caught:
            values(function, np.ones(3, np.float32), np.ones(3, np.float32))
        assert caught.value.primitive == primitive


class Renamed:
    """A scan as JAX 0.11 describes it: a tree of its arguments in place of two numbers."""

    def __init__(self, eqn, params):
        self.primitive, self.params = eqn.primitive, params


@pytest.mark.parametrize("known", [True, False])
def test_loops_of_newer_versions_of_jax(known):
    closed = jax.make_jaxpr(lambda x: jax.lax.scan(lambda total, v: (total + v, 2 * v), x[0], x))(
        np.ones(3)
    )
    (eqn,) = [e for e in closed.jaxpr.eqns if e.primitive.name == "scan"]
    params = {
        name: v
        for name, v in eqn.params.items()
        if name not in ("num_consts", "num_carry", "ft_in")
    }
    if known:
        params["ft_in"] = SimpleNamespace(unpack=lambda: ((), (None,), (None,)))
    graph = Graph()
    x = np.array([graph.leaf("x", k) for k in range(3)])
    once = lambda: _scalarise_equation(graph, Renamed(eqn, params), [x[0], x])
    if not known:
        with pytest.raises(Unsupported, match="num_consts"):
            once()
        return
    nodes = [int(node) for ids in once() for node in np.ravel(ids)]
    assert graph.evaluate(nodes, lambda kind, k: [2.0, 3.0, 5.0][k]) == [12.0, 4.0, 6.0, 10.0]


def test_equal_expressions_are_one_node_and_constants_are_folded():
    graph = Graph()
    x, y, k = graph.leaf("x", 0), graph.leaf("x", 1), graph.leaf("theta", 0)
    make = graph.make
    assert make("sin", make("sub", x, y)) == make("neg", make("sin", make("sub", y, x)))
    assert make("mul", graph.const(0.0), x) == graph.const(0.0)
    assert make("mul", k, make("mul", x, k)) == make(
        "mul", make("mul", k, k), x
    )  # what is shared comes together
    assert make("add", graph.const(1.0), graph.const(2.0)) == graph.const(3.0)
    assert graph.power(x, 2) == make("mul", x, x)
