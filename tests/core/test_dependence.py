"""What may depend on what, by the operations of a function: exact where there are rules, and
never too little.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fluctua.core.dependence import depends, find_slopes, find_sources, varies_in_slope

X = jnp.array([0.3, -0.7])
THETA = {"k": jnp.array(2.0), "f": jnp.array(0.5)}
TIME = jnp.array(0.1)
CLEAN = {
    "array": lambda th: jnp.array([X[1], -th["k"] * X[0] + th["f"]]),
    "concatenate": lambda th: jnp.concatenate([X[1:], -th["k"] * jnp.tanh(X[:1])]),
    "stack": lambda th: jnp.stack([X[1], jnp.where(TIME > 1, th["k"], 0.0)]),
    "diagonal": lambda th: jnp.diag(jnp.array([0.0, th["k"]])).sum(axis=1),
    "set": lambda th: jnp.zeros(2).at[1].set(th["f"]).at[0].add(X[1]),
    "matrix": lambda th: jnp.array([[0.0, 1.0], [-th["k"], -0.1]]) @ X,
    "loop": lambda th: jnp.array([X[1], jax.lax.fori_loop(0, 3, lambda i, v: v * th["k"], X[0])]),
    "rounded": lambda th: jnp.array(
        [X[1] + jnp.floor(th["k"]) + (th["f"] > X[0]), th["f"]]
    ),  # steps have no slope
    "cond": lambda th: jax.lax.cond(
        TIME > 0, lambda f: jnp.array([X[1], f]), lambda f: jnp.array([0.0, f**2]), th["f"]
    ),
}
MIXED = {
    "where": lambda th: jnp.array([X[1] + jnp.where(TIME > 1, th["f"], 0.0), th["k"]]),
    "product with a comparison": lambda th: jnp.array([X[1] + th["f"] * (X[1] > 9), th["k"]]),
    "branch": lambda th: jax.lax.cond(
        TIME > 1, lambda f: jnp.array([f, X[1]]), lambda f: jnp.array([X[1], f]), th["f"]
    ),
    "unknown index": lambda th: jnp.zeros(2).at[jnp.argmax(X)].set(th["f"]),
    "unknown operation": lambda th: jnp.sort(jnp.array([X[1], th["f"]])),
    "row of a matrix": lambda th: jnp.array([[0.0, th["k"] * (TIME > 1)], [th["k"], 0.0]]) @ X,
}


@pytest.mark.parametrize("f", CLEAN.values(), ids=CLEAN)
def test_the_row_that_has_no_parameter_is_known(f):
    assert find_slopes(f, THETA).tolist() == [False, True]


@pytest.mark.parametrize("f", MIXED.values(), ids=MIXED)
def test_a_parameter_that_enters_elsewhere_is_not_overlooked(f):
    assert find_slopes(f, THETA).all()


def test_marks_cover_the_slopes_of_products_and_sums():
    """Random matrices with holes: what autodiff finds is marked, and the holes are not."""
    rng = np.random.default_rng(0)
    left, right = (
        rng.normal(size=shape) * (rng.uniform(size=shape) < 0.5) for shape in ((2, 3, 4), (4, 5))
    )
    where = left != 0

    def fill(v):
        rows = [
            v * number if there else number
            for number, there in zip(left.ravel(), where.ravel(), strict=True)
        ]
        return jnp.stack(rows).reshape(left.shape)

    product = lambda v: jnp.einsum("bij,jk->kbi", fill(v), right).sum(axis=0)
    slopes = np.asarray(jax.jit(jax.jacfwd(product))(1.0))
    marks = find_slopes(product, jnp.array(1.0))
    assert marks.shape == slopes.shape
    assert marks[slopes != 0].all()
    assert marks.tolist() == where.any(axis=2).tolist()


def test_affine_functions_of_the_state_are_known_whatever_the_time():
    piecewise = lambda x, t: jnp.where(t > 0.5, -2 * x, 3 * x[::-1]) + jnp.sin(t)
    assert not varies_in_slope(piecewise, X, TIME, on=0)
    assert varies_in_slope(
        lambda x, t: -2 * x - jnp.where(t > 0.5, 1.0, 0.0) * x**3 + 1, X, TIME, on=0
    )
    assert varies_in_slope(lambda x, t: jnp.where(x > 0, -2 * x, 3 * x), X, TIME, on=0)
    assert depends(piecewise, X, TIME, on=1)
    assert not depends(lambda x, t: jnp.zeros_like(x) + t, X, TIME, on=0)


def test_a_constant_zero_is_no_dependence_and_a_value_of_zero_is():
    bend = lambda chi, x: -x + chi * x**3
    assert not varies_in_slope(lambda x: bend(np.zeros(2), x), X, on=0)
    assert varies_in_slope(lambda x: bend(np.array([0.0, 0.1]), x), X, on=0)
    assert varies_in_slope(bend, jnp.zeros(2), X, on=1)


# ----------------------------------------------------------------------- the source of each element

PLACES = np.array([4, 0, -1])
SINGLE = {  # f(θ, u), and the element of u behind each element of f
    "shifted": (lambda th, u: th["k"] * u[1:4] + th["f"], [1, 2, 3]),
    "in another order": (lambda th, u: jnp.exp(u[::-1]), [4, 3, 2, 1, 0]),
    "set": (lambda th, u: jnp.zeros(6).at[PLACES].set(u[1:4]), [2, -1, -1, -1, 1, 3]),
    "constant": (lambda th, u: jnp.ones(2) * th["k"], [-1, -1]),
    "twice the same": (lambda th, u: u[:2] * jnp.sin(u[:2]), [0, 1]),
}


@pytest.mark.parametrize("case", SINGLE)
def test_the_one_source_of_each_element_is_found(case):
    f, expected = SINGLE[case]
    u = np.arange(5.0)
    sources = find_sources(f, THETA, u, on=1)
    np.testing.assert_array_equal(sources, expected)
    jacobian = np.asarray(jax.jit(jax.jacfwd(lambda v: f(THETA, v)))(u))
    along = jax.jit(lambda v: jax.jvp(lambda v: f(THETA, v), (v,), (jnp.ones(5),))[1])(u)
    along = np.asarray(along)
    whole = np.zeros(jacobian.shape)
    rows = np.flatnonzero(np.asarray(sources) >= 0)
    whole[rows, np.asarray(sources)[rows]] = along[rows]
    np.testing.assert_allclose(whole, jacobian)


def test_an_element_with_two_sources_has_no_single_one():
    u = jnp.arange(5.0)
    assert find_sources(lambda th, u: u[:4] + u[1:], THETA, u, on=1) is None
    assert find_sources(lambda th, u: jnp.sort(u), THETA, u, on=1) is None  # no rule
    one = find_sources(lambda th, u: {"a": u * th["k"], "b": 2 * u}, THETA, jnp.ones(1), on=1)
    np.testing.assert_array_equal(one["a"], [0])
