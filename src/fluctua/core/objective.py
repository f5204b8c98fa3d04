"""What a user wants of a system: rewards, whose expected sum is maximised."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from fluctua.core.arrays import Array
from fluctua.core.display import records


class Objective(NamedTuple):
    """Objective: the expected sum of rewards that is maximised (Eq. 2, and two more).

        J = E[g_T(X_T) + ∫ g(X_t, t) dt + Σ_n r(X_n, X_{n+1}) + g_0(X_0)]

    running: (theta, x, t, context) -> g, a scalar rate of reward.
    terminal: (theta, x, context) -> g_T, a scalar.
    per_step: (theta, x, x_next, t, dt, context) -> r, a scalar for the step as a whole and not a
        rate: work, heat, a current, anything that depends on both ends of a step. The score of a
        step meets the reward of that step.
    initial: (theta, x0, context) -> g_0, a scalar.
    stop: (theta, x, t, context) -> a level, a scalar or (K,) for K boundaries, or True and False. A
        trajectory ends at the first time of the grid at which a level is ≥ 0: it collects no
        further reward and has no further score, and `terminal` is of the state there. The running
        reward 1 then has the return min(τ, T).
    overshoot: None, or "bridge" for a level that the process may reach between two times of the
        grid: each step then counts with the probability of a Brownian bridge not to have crossed.

    Each may be None (no such reward). Arguments at the end that are not used may be left off.

    >>> energy = fl.Objective(running=lambda theta, x: x[0] ** 2 / 2)
    >>> target = fl.Objective(terminal=lambda theta, x: -((x[0] - 0.5) ** 2))
    >>> work = fl.Objective(per_step=lambda theta, x, x_next: theta["k"] * x[0] * (x_next - x)[0])
    >>> passage = fl.Objective(running=lambda theta, x: 1.0, stop=lambda theta, x: 0.5 - x[0])
    >>> fl.ppgt(simulator, passage)(key, theta, 200).stopped  # part that fell below 0.5
    0.81...
    """

    running: Callable[..., Array] | None = None
    terminal: Callable[..., Array] | None = None
    per_step: Callable[..., Array] | None = None
    initial: Callable[..., Array] | None = None
    stop: Callable[..., Array] | None = None
    overshoot: str | None = None

    def __repr__(self) -> str:
        return records.describe_parts("Objective", records.name_parts(self._asdict()))

    def _repr_html_(self) -> str:
        return records.render_parts("Objective", records.name_parts(self._asdict()))


class FunctionOfMeans(NamedTuple):
    """J = F(m₁, …, m_K), a function of expected returns m_i = E[R_i]; made by `function_of_means`.

    function: F, of K numbers. parts: the K objectives.
    """

    function: Callable[..., Array]
    parts: tuple[Any, ...]


class StopRule(NamedTuple):
    """Rule that ends a trajectory; `fluctua.core.stopping` evaluates it.

    level: (theta, x, t, context) -> a scalar or (K,), ≥ 0 where it ends; or True and False.
    bridge: whether crossings between two times of the grid count.
    process: whose noise the bridge has, once it is known (`stopping.bind_process`).
    """

    level: Callable[..., Array]
    bridge: bool = False
    process: Any = None


class Rewards(NamedTuple):
    """An `Objective` as the library calls it: its rewards take all their arguments.

    A missing running or terminal reward is zero. A missing step or initial one stays None: nothing
    is computed for it, and neither for a missing stop.
    """

    running: Callable[..., Array]
    terminal: Callable[..., Array]
    per_step: Callable[..., Array] | None = None
    initial: Callable[..., Array] | None = None
    stop: StopRule | None = None
