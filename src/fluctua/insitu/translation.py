"""A process as a function of other parameters, from which its settings and context follow."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from fluctua.core import check
from fluctua.core.arrays import Params, PyTree
from fluctua.core.integrators import map_step_parameters
from fluctua.core.objective import Objective, Rewards
from fluctua.core.process import NoiseProduct, Process
from fluctua.processes.observed import Normal, Observed


class OperatingPoint(NamedTuple):
    """Settings and context at which a process is evaluated."""

    settings: Params
    context: PyTree


Translate = Callable[[Params, PyTree], OperatingPoint]
"""(parameters, context) -> settings and context."""


@dataclass(frozen=True)
class _Translated:
    """A function of settings and context as one of other parameters.

    A record, so that equal ones share a compilation. position: of the context after θ.
    """

    function: Callable[..., Any]
    translate: Translate
    position: int

    def __call__(self, theta: Params, *rest: Any) -> Any:
        settings, context = self.translate(theta, rest[self.position])
        arguments = list(rest)
        arguments[self.position] = context
        return self.function(settings, *arguments)


@dataclass(frozen=True)
class _SettingsAt:
    """(parameters, context) -> settings."""

    translate: Translate

    def __call__(self, theta: Params, context: PyTree) -> Params:
        return self.translate(theta, context).settings


def translate_process(process: Process | Observed, translate: Translate) -> Any:
    """The process as a function of other parameters, from which settings and context follow.

    Of an `Observed` the readout and the start too. Returns: a process of the same kind.
    """
    if isinstance(process, Observed):
        return _translate_observed(process, translate)
    itself: Process = check.process(process)

    def at(function: Any) -> Any:
        return None if function is None else _Translated(function, translate, 2)

    noise = itself.noise
    if isinstance(noise, NoiseProduct):
        noise = noise._replace(product=at(noise.product))
    else:
        noise = at(noise)
    step = map_step_parameters(itself.integrator, _SettingsAt(translate))
    return itself._replace(
        drift=at(itself.drift), noise=noise, diffusion=at(itself.diffusion), integrator=step
    )


def _translate_observed(observed: Observed, translate: Translate) -> Observed:
    def at(value: Any) -> Any:
        return _Translated(value, translate, 0) if callable(value) else value

    start = Normal(*map(at, observed.start))
    process = translate_process(observed.process, translate)
    return replace(observed, process=process, noise=at(observed.noise), start=start)


def translate_rewards(objective: Objective | Rewards, translate: Translate) -> Rewards:
    """The rewards as functions of other parameters, from which settings and context follow."""
    rewards = check.objective(objective)
    return Rewards(*(_translate_reward(reward, translate) for reward in rewards))


def _translate_reward(reward: Any, translate: Translate) -> Any:
    return None if reward is None else _Translated(reward, translate, -1)


@dataclass(frozen=True)
class Corrected:
    """(θ, calibration) -> the settings at which a device does θ, and its calibration."""

    correct: Callable[[Params, PyTree], Params]

    def __call__(self, theta: Params, context: PyTree) -> OperatingPoint:
        return OperatingPoint(self.correct(theta, context), context)
