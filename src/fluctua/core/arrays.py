"""Arrays and pytrees: their types, compilation, and transfers that compile nothing.

Shapes use one set of letters throughout the library: E trajectories, T steps, M state components,
P parameters, W independent Wiener processes.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.interpreters import ad

if TYPE_CHECKING:
    Array = Any  # JAX and NumPy arrays alike; their stubs do not mix
else:
    Array = jax.Array | np.ndarray
PyTree = Any
Params = PyTree
"""Parameters θ: any pytree of floating-point arrays."""


def working_dtype(theta: Params, x: Array) -> np.dtype:
    """The precision of an estimate: the finer of that of the parameters and that of the states."""
    return jax.numpy.result_type(x, *jax.tree.leaves(theta))


def on_host(array: Array) -> np.ndarray:
    """The numbers of an array.

    From a GPU by way of CuPy, if that is in use, which is ten times as fast as JAX.
    """
    cupy = sys.modules.get("cupy")
    if cupy is None or not _is_on_gpu(array) or not _is_in_order(array):
        return np.asarray(array)
    numbers = np.empty(array.shape, array.dtype)
    array.block_until_ready()
    if numbers.size:
        runtime = cupy.cuda.runtime
        source = array.unsafe_buffer_pointer()
        runtime.memcpy(numbers.ctypes.data, source, numbers.nbytes, runtime.memcpyDeviceToHost)
    return numbers


def _is_on_gpu(array: Array) -> bool:
    """Whether an array is on a single device, a GPU."""
    if not isinstance(array, jax.Array):
        return False
    devices = array.devices()
    return len(devices) == 1 and next(iter(devices)).platform == "gpu"


def _is_in_order(array: Array) -> bool:
    """Whether the memory of an array has its elements row by row, as NumPy does."""
    if array.ndim < 2:
        return True
    layout = array.format.layout
    return layout is not None and layout.major_to_minor == tuple(range(array.ndim))


def jit(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """Compile by `jax.jit`, with matrix products in full precision.

    A GPU multiplies float32 matrices in TF32 by default, with 10 bits of mantissa: a neural drift
    then moves a gradient by half a standard error at 100,000 trajectories.
    """

    @functools.wraps(function)
    def traced(*arguments: Any, **named: Any) -> Any:
        with jax.default_matmul_precision("highest"):
            return function(*arguments, **named)

    return jax.jit(traced, **options)


def put(array: np.ndarray) -> Array:
    """A NumPy array that is not changed afterwards, as an array of JAX.

    `jnp.asarray` compiles a program for every shape.
    """
    return jax.device_put(array)


@functools.cache
def _find_host() -> jax.Device | None:
    """The device of JAX that is the host; None where JAX has only others."""
    try:
        return jax.local_devices(backend="cpu")[0]
    except RuntimeError:
        return None


def is_on_host(array: Array) -> bool:
    """Whether the numbers of an array are read without a transfer."""
    if not isinstance(array, jax.Array) or isinstance(array, jax.core.Tracer):
        return isinstance(array, np.ndarray)
    return all(device.platform == "cpu" for device in array.devices())


def put_on_host(tree: PyTree) -> PyTree:
    """A pytree of NumPy arrays as arrays of JAX in the memory of the host, also beside a GPU.

    They are bound to no device: JAX moves them where they are used. From the second tree of the
    same shapes on, one compiled call puts all of it, as fast as a single array; its compilation
    takes as long as hundreds of them. Where JAX has no CPU they are on its default device. They are
    copies: later changes of the NumPy arrays do not reach them.
    """
    leaves, structure = jax.tree.flatten(tree)
    code = (structure, *[(leaf.shape, leaf.dtype) for leaf in leaves])
    put_before = code in _PUT_BEFORE
    if len(_PUT_BEFORE) >= MAX_PUT:
        _PUT_BEFORE.clear()
    _PUT_BEFORE.add(code)
    with compute_on_host():
        if put_before:
            return _return_tree(tree)
        return jax.device_put(jax.tree.map(_copy, tree))


def _copy(leaf: Any) -> Any:
    """A copy of an array of NumPy, whose memory JAX would share on the host."""
    return leaf.copy() if isinstance(leaf, np.ndarray) else leaf


@contextmanager
def compute_on_host() -> Iterator[None]:
    """Context in which JAX computes on the host, if no argument is bound to another device.

    Numbers of NumPy are in its memory already, and are no transfer that a guard is to stop.
    """
    with jax.default_device(_find_host()), jax.transfer_guard_host_to_device("allow"):
        yield


_PUT_BEFORE: set[Any] = set()
MAX_PUT = 1024
_return_tree = jit(lambda tree: tree)


def part(array: Array, index: Any) -> Array:
    """array[index].

    By way of NumPy where that is no transfer: a slice, too, is compiled for every shape.
    """
    if jax.default_backend() != "cpu" or isinstance(array, jax.core.Tracer):
        return array[index]
    return put(np.asarray(array)[index])


def concatenate_rows(arrays: Sequence[Array]) -> Array:
    """Their rows, one array after the other; like `part`."""
    if jax.default_backend() != "cpu":
        return jnp.concatenate(arrays)
    return put(np.concatenate([np.asarray(array) for array in arrays]))


def is_key(leaf: Any) -> bool:
    """Whether an array is of random keys, which NumPy does not know."""
    return isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.extended)


def root_covariance(covariance: Array) -> Array:
    """A lower triangular A with A Aᵀ = covariance (M, M), also where it is singular.

    Column by column (Cholesky); a pivot that is zero to rounding gives a column of zeros. Not by
    LAPACK: two of its batches at once can block each other for ever where XLA has two threads.
    """
    size = covariance.shape[-1]
    rows = jnp.arange(size)
    smallest = size * jnp.finfo(covariance.dtype).eps * jnp.diagonal(covariance)

    def add_column(rest: Array, j: Array) -> tuple[Array, Array]:
        pivot = rest[j, j]
        regular = ~(pivot <= smallest[j])  # true of NaN, which is passed on
        root = jnp.sqrt(jnp.where(regular, pivot, 1))
        column = jnp.where(regular & (rows >= j), rest[:, j] / root, 0)
        return rest - jnp.outer(column, column), column

    columns = jax.lax.scan(add_column, covariance, rows)[1]
    return columns.T


# ---------------------------------------------------------------------------------- JAX before 0.11


def _derive_maxima() -> None:
    """Give max and min of JAX the derivatives that they have from version 0.11 on.

    Before, all went to the operand that equals the result. A compiler that computes the operand
    twice and rounds it in two ways finds none: compiled gradients of `jnp.hypot` were off by half.
    """

    def share(x: Array, y: Array) -> Array:
        one = jnp.ones_like(x)
        return jnp.where(x > y, one, jnp.where(x == y, one / 2, jnp.zeros_like(x)))

    ad.defjvp(jax.lax.max_p, lambda g, x, y: g * share(x, y), lambda g, x, y: g * share(y, x))
    ad.defjvp(jax.lax.min_p, lambda g, x, y: g * share(y, x), lambda g, x, y: g * share(x, y))


if jax.__version_info__ < (0, 11):
    _derive_maxima()
