"""Long records with readout noise: a twin by control variates, and the correction of shared noise.

With control variates the mean reward is that of the model. J is therefore taken from the record.
"""

from __future__ import annotations

import warnings

import jax
import jax.numpy as jnp
import numpy as np

from fluctua.core import baselines, check, recorded, scores
from fluctua.core import process as processes
from fluctua.core.arrays import Params
from fluctua.core.objective import Objective
from fluctua.core.trajectories import Trajectories
from fluctua.insitu import estimating, readout
from fluctua.insitu.long_record import LongRecord
from fluctua.insitu.recording.reader import RecordingFile
from fluctua.processes import control_variates, record_passes
from fluctua.processes import stationary as stationary_record
from fluctua.processes.pieces import UNCUT, join_records

CONTRADICTION = 4.0
"""Standard errors of J by which a record may differ from its twin."""


def fit_record_control(
    twin: baselines.Twin,
    record: LongRecord,
    process: processes.AnyProcess,
    objective: Objective,
    score: processes.Score,
    noise: np.ndarray,
    theta: Params,
) -> control_variates.FittedControl:
    """Fit control variates, in place of a twin whose path would restart at noisy states."""
    if twin.process is not None or twin.theta is not None:
        raise ValueError(
            "with observation noise the twin is the model of the score: leave `process` and "
            "`theta` of the Twin off."
        )
    if not isinstance(process, processes.Process):
        raise ValueError(f"a twin of noisy states is for diffusions; got {type(process).__name__}.")
    whole = record.recording.trajectories(load=True)
    cuts = UNCUT if record.pieces is None else record.pieces.cuts
    x = np.asarray(whole.x, np.float64)
    memories = [
        stationary_record.memory_time(x[:, :, i], cuts)
        for i in range(x.shape[2])
        if np.ptp(x[:, :, i]) > 0
    ]
    independent = x.shape[0] * x.shape[1] / max(memories, default=1.0)
    return control_variates.fit_control(
        process,
        estimating.TRANSITIONS[score],
        objective,
        theta,
        whole,
        independent,
        readout=noise,
    )


def restore_value(
    answer: stationary_record.Stationary,
    record: LongRecord,
    process: processes.Process,
    objective: Objective,
    noise: np.ndarray,
    theta: Params,
) -> stationary_record.Stationary:
    """Replace J and its error, those of the model with control variates, by those of the record.

    Warns where the two differ, since the gradient is then not that of the record either.
    """
    joined, pieces = join_records(record.list_records())
    rewards = check.objective(readout.correct_objective(objective, noise))
    source = record_passes.Source(
        check.process(process),
        rewards,
        scores.full_score,
        theta,
        recorded.Recording(joined, theta),
        None,
        pieces,
    )
    g = record_passes.read_rewards(source).rewards
    own = stationary_record.autocorrelation_time(g, pieces.cuts)
    dt = float(np.mean(np.diff(record.recording.t)))
    blocks = pieces.average_blocks(g, max(round(answer.length / dt), int(np.ceil(10 * own))))
    value = stationary_record.average_batches(theta, answer.batches, blocks)
    error = float(value.value_stderr)
    model = float(answer.estimate.value)
    if abs(float(g.mean()) - model) > CONTRADICTION * error:
        warnings.warn(
            f"the record is not that of the twin: its mean reward is {g.mean():.4g} ± {error:.2g} "
            f"and that of the model {model:.4g}. The gradient is biased likewise: calibrate, or "
            'use baseline "time".',
            RuntimeWarning,
            stacklevel=3,
        )
    estimate = answer.estimate._replace(
        value=jnp.asarray(g.mean()),
        value_stderr=value.value_stderr,
        value_interval=value.value_interval,
    )
    return answer._replace(estimate=estimate, autocorrelation_time=own * dt)


def subtract_shared_noise(
    answer: stationary_record.Stationary,
    recording: RecordingFile,
    process: processes.Process,
    objective: Objective,
    score: processes.Score,
    noise: np.ndarray,
    theta: Params,
) -> stationary_record.Stationary:
    """Subtract what a kick and the next reward share through the noise of one sample.

    See `insitu.readout`, term (b).
    """
    dt = float(np.mean(np.diff(recording.t)))
    length = round(answer.length / dt)
    assert answer.starts is not None
    many = len(answer.starts)
    rewards = check.objective(objective)
    checked = check.process(process)
    off = []
    t = dt * np.arange(length + 2)
    for j in range(recording.count):
        one = recording.trajectories(j, j + 1, load=True)
        x = jnp.asarray(one.x[0], jnp.result_type(*jax.tree.leaves(theta), one.x.dtype))
        # from the kick before the batch to one sample after it, whose reward is terminal in
        # `compute_reward_term`: zero
        rows = answer.starts[:, None] - 1 + np.arange(length + 2)
        context = jax.tree.map(lambda leaf: jnp.repeat(leaf, many, axis=0), one.context)
        data = Trajectories(jnp.asarray(t, x.dtype), x[rows], context)
        off.append(
            np.asarray(
                readout.compute_reward_term(
                    checked, rewards, score, jnp.asarray(noise), theta, data
                ),
                np.float64,
            )
        )
    batches = answer.batches - np.concatenate(off) / (length * dt)
    before = answer.estimate
    estimate = stationary_record.average_batches(theta, batches, batches[:, 0])._replace(
        value=before.value, value_stderr=before.value_stderr, value_interval=before.value_interval
    )
    return stationary_record.include_bias(answer._replace(estimate=estimate, batches=batches))
