"""Whether a baseline of one's own is independent of the kick it multiplies, found by trying it.

(λ̂ⱼ − λ̄ⱼ)Uⱼ has the right mean for every λ̄ⱼ that depends neither on the return λ̂ⱼ nor on the score
Uⱼ of its own trajectory. A baseline is therefore called on a small made-up ensemble, the return or the
score of one trajectory is changed, and λ̄ of that trajectory must stay what it was. The baselines of
the library have tests of their own, and are not tried.

Not seen is what a baseline holds besides its `Kick`: a table made of the trajectories that it is used
on passes.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

from fluctua.core import check
from fluctua.core.baselines import Baseline, Kick, is_library
from fluctua.core.types import Array, Params, PyTree

ENSEMBLE = 64
"""Trajectories of the made-up ensemble; a mean that does not leave one out moves by 1/64 of the change."""

CHANGES = (1.0, -1e3, 1e3)
"""What is added to the return or the score of one trajectory, in units of max(1, |λ̄|)."""

START = -1
"""Index of the draw of X₀."""


class Setting(NamedTuple):
    """What a baseline is tried with.

    t: the time grid (T+1,). count: trajectories of the call. start: () -> states at the start (E, M)
    and their contexts, some at least; called for a baseline that is tried for the first time.
    """

    theta: Params
    t: Array
    count: int  # type: ignore[assignment]
    start: Callable[[], tuple[Array, PyTree]]


class _Change(NamedTuple):
    """Step n and trajectory j; what is added to the return and to every score of that trajectory."""

    index: Array
    trajectory: Array
    of_return: Array
    of_score: Array


_ADMITTED: dict[Any, None] = {}
"""Baselines that were tried and found independent, the latest."""

MOST_ADMITTED = 256


def check_admissible(baseline: Baseline, setting: Setting, *, of_start: bool = False) -> None:
    """Refuse a baseline that depends on the return or the score of its own trajectory.

    It is tried once, not at every call. of_start: whether it is the baseline of the draw of X₀.
    """
    if is_library(baseline.of) or setting.count < baseline.fewest:  # too few are refused by `check_baseline`
        return
    code = (baseline.of, of_start, check.form(setting.theta))
    if code in _ADMITTED:
        return
    size = min(setting.count, max(ENSEMBLE, baseline.fewest))
    try:
        leak = _find_leak(baseline, setting, size, of_start)
    except Exception:  # one that holds a row per trajectory serves no other number of them
        if size == setting.count:
            raise
        leak = _find_leak(baseline, setting, setting.count, of_start)
    if leak is not None:
        raise ValueError(leak)
    _ADMITTED[code] = None
    if len(_ADMITTED) > MOST_ADMITTED:
        _ADMITTED.pop(next(iter(_ADMITTED)))


def _find_leak(baseline: Baseline, setting: Setting, size: int, of_start: bool) -> str | None:
    """The message for a baseline whose own entry moves with the return or the score; None without one."""
    last = len(setting.t) - 2
    steps = [START] if of_start else sorted({0, last // 2, last})
    kick = _made_up(baseline, setting, size, of_start)
    trajectories = sorted({0, size // 2, size - 1})
    places = [(n, j) for n in steps for j in trajectories]
    of = lambda rows: np.asarray(_evaluate(baseline.of, kick, setting.t, _columns(rows)), np.float64)
    before = of([(n, j, 0.0, 0.0) for n, j in places])
    unit = max(1.0, float(np.nanmax(np.abs(before), initial=0.0)))
    # where more than half of the digits are lost, nothing can be said
    limit = np.sqrt(np.finfo(kick.returns.dtype).eps)
    for what, row in (("return", (1.0, 0.0)), ("score", (0.0, 1.0))):
        for change in CHANGES:
            added = unit * change
            after = of([(n, j, added * row[0], added * row[1]) for n, j in places])
            moved = np.abs(after - before).max(axis=1) / abs(added)
            worst = int(np.argmax(np.nan_to_num(moved)))
            if moved[worst] > limit:
                n, j = places[worst]
                return _describe(baseline.of, what, moved[worst], n, j, size)
    return None


def _describe(of: Callable[[Kick], Array], what: str, moved: float, n: int, j: int, size: int) -> str:
    name = getattr(of, "__name__", type(of).__name__)
    where = "the draw of X₀" if n == START else f"step {n}"
    return (
        f"the baseline `{name}` depends on the {what} of its own trajectory: among {size} made-up "
        f"trajectories the entry of trajectory {j} moved by {moved:.3g} per unit of it, at {where}. The "
        "gradient would be biased. Leave the trajectory itself out, as mean() and optimal() do, or look "
        "at `kick.x`, `kick.t` and `kick.context` only."
    )


def _made_up(baseline: Baseline, setting: Setting, size: int, of_start: bool) -> Kick:
    """An ensemble about the first states, with returns, scores and a table of order one."""
    rng = np.random.default_rng(0)
    theta = setting.theta
    x, context = setting.start()
    width = ravel_pytree(theta)[0].size
    dtype = jnp.result_type(x, *jax.tree.leaves(theta))
    rows = np.arange(size) % len(x)
    first = np.asarray(x)[rows]
    spread = np.maximum(np.abs(first).max(axis=0), 1.0)
    states = jnp.asarray(first + 0.1 * spread * rng.normal(size=first.shape), dtype)
    table = baseline.values
    if table is None and baseline.pilot:
        table = jnp.asarray(rng.normal(size=len(setting.t)), dtype)
    return Kick(
        index=jnp.array(START),
        theta=theta,
        x=None if of_start else states,
        t=jnp.asarray(setting.t)[0],
        context=jax.tree.map(lambda leaf: leaf[rows], context),
        returns=jnp.asarray(rng.normal(size=size), dtype),
        score=jnp.asarray(rng.normal(size=(size, width)), dtype),
        values=table,
    )


def _columns(rows: list[tuple[int, int, float, float]]) -> _Change:
    index, trajectory, of_return, of_score = zip(*rows, strict=True)
    return _Change(np.array(index), np.array(trajectory), np.array(of_return), np.array(of_score))


@partial(jax.jit, static_argnums=0)
def _evaluate(of: Callable[[Kick], Array], kick: Kick, t: Array, changes: _Change) -> Array:
    """λ̄ of the changed trajectory, one row per change. (C, P)

    Compiled once for all changes: what a baseline draws while it is traced is the same in all of them.
    """
    size = kick.score.shape

    def one(change: _Change) -> Array:
        n, j, of_return, of_score = change
        returns = kick.returns.at[j].add(of_return.astype(kick.returns.dtype))
        score = kick.score.at[j].add(of_score.astype(kick.score.dtype))
        bar = jnp.asarray(of(kick._replace(index=n, t=t[jnp.maximum(n, 0)], returns=returns, score=score)))
        try:
            return jnp.broadcast_to(bar, size)[j]
        except ValueError:
            raise ValueError(
                f"a baseline must broadcast to (trajectories, parameters), {size}; it has shape "
                f"{bar.shape}. One number per trajectory is written values[:, None]."
            ) from None

    return jax.lax.map(one, changes)
