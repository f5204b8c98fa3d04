"""Records in the forms that laboratory software returns, read as a `Batch`.

A form is taken if it has one meaning only. Complex channels become the state [Re, Im], as in
recordings: (…, C) complex → (…, 2C) real.

A record of another length or count may be a transient fault (`InvalidReply`, which
is retried). A record of another kind is not (`CommandRejected`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fluctua.core import check
from fluctua.core.arrays import Array
from fluctua.core.trajectories import Trajectories
from fluctua.insitu.instrument.protocol import Batch, CommandRejected, InvalidReply
from fluctua.insitu.instrument.visit import SAME_TIME

FORMS = (
    "an array (trajectories, times, channels), a list of trajectories, one trajectory (times, "
    "channels) or (times,), a pair (t, x), the path of a .npy file, a Batch or Trajectories"
)


class RecordShape(NamedTuple):
    """Known shape of a record before it is read; None stands for unknown.

    trajectories: how many.
    t: sampling times (T+1,).
    interval: time between two samples.
    points: samples per trajectory.
    channels: components of a real state; a complex channel counts as two.
    """

    trajectories: int
    t: np.ndarray | None = None
    interval: float | None = None
    points: int | None = None
    channels: int | None = None

    def describe(self, is_complex: bool = False) -> str:
        """The shape in words: `(100 trajectories, 301 times, 2 channels)`."""
        channels = self.count_channels(is_complex)
        kind = "complex channels" if is_complex else "channels"
        times = "times" if self.points is None else f"{self.points} times"
        last = kind if channels is None else f"{channels} {kind}"
        return f"({self.trajectories} trajectories, {times}, {last})"

    def count_channels(self, is_complex: bool) -> int | None:
        """Channels of an array, of which a complex one is two components of the state."""
        return self.channels // 2 if is_complex and self.channels else self.channels


def read_record(record: Any, shape: RecordShape) -> Batch:
    """Read a record of any clear form as a `Batch`.

    Args:
        record: an array (E, T+1, M), a list of trajectories, one trajectory (T+1, M) or (T+1,), a
            pair (t, x), the path of a .npy file, a `Batch` or `Trajectories`.
        shape: what is known of it.

    Returns: samples (E, T+1, M), real; complex channels as [Re, Im].
    """
    if isinstance(record, Batch):
        return _check_batch(record, shape)
    if _lists_trajectories(record, shape):
        one = shape._replace(trajectories=1)
        return join_batches([read_record(trajectory, one) for trajectory in record])
    context = None
    t: Any = None
    if isinstance(record, Trajectories):
        t, record, context = _open_trajectories(record)
    elif isinstance(record, tuple):
        t, record = _split_pair(record)
    x = _arrange(_load(record), shape)
    return Batch(_resolve_times(t, x.shape[1], shape), x, context=context)


def join_batches(batches: Sequence[Batch]) -> Batch:
    """One batch of all trajectories, whose times must agree."""
    first = batches[0]
    for k, batch in enumerate(batches):
        if not _are_equal_times(np.asarray(batch.t), np.asarray(first.t)):
            raise InvalidReply(
                f"all trajectories must have the same times; trajectory {k} has "
                f"{_describe_times(batch.t)}, the first has {_describe_times(first.t)}. Count time "
                "from the start of each trajectory"
            )
        if (batch.scale, batch.full_scale) != (first.scale, first.full_scale):
            raise CommandRejected(
                "all trajectories must have the same `scale` and `full_scale`; those of "
                f"trajectory {k} differ from those of the first."
            )
    contexts = [batch.context or {} for batch in batches]
    names = contexts[0].keys()
    context = {name: np.concatenate([c[name] for c in contexts]) for name in names}
    samples = np.concatenate([np.asarray(batch.samples) for batch in batches])
    return first._replace(samples=samples, context=context or None)


def _lists_trajectories(record: Any, shape: RecordShape) -> bool:
    """Whether it is a list with one entry per trajectory, each more than one number."""
    if not isinstance(record, list) or len(record) != shape.trajectories:
        return False
    return not any(isinstance(one, int | float | complex | np.generic) for one in record)


def _check_batch(batch: Batch, shape: RecordShape) -> Batch:
    samples = np.shape(batch.samples)
    if len(samples) == 3:
        _check_lengths(samples, shape)
        return batch._replace(t=_resolve_times(batch.t, samples[1], shape))
    return batch  # `check_answers` refuses it


def _open_trajectories(record: Trajectories) -> tuple[Array, Array, Mapping[str, Any] | None]:
    """Times, states and context, where a batch has a place for all that there is."""
    if record.events is not None or record.group is not None:
        raise CommandRejected(
            "`acquire` returned Trajectories with events or groups, which a batch cannot hold. "
            "Return Trajectories(t, x, context)."
        )
    if record.context is not None and not isinstance(record.context, Mapping):
        raise CommandRejected(
            "the context of a record must be a dictionary of arrays, one row per trajectory; "
            f"`acquire` returned a {type(record.context).__name__}. Give each entry a name."
        )
    return record.t, record.x, record.context


def _split_pair(record: tuple) -> tuple[Any, Any]:
    if len(record) != 2:
        raise CommandRejected(
            f"a tuple is read as a pair (t, x); `acquire` returned a tuple of {len(record)}. "
            "Return trajectories as a list or an array."
        )
    t = np.asarray(record[0])
    if t.ndim != 1 or t.dtype.kind not in "fiu":
        raise CommandRejected(
            f"a tuple is read as a pair (t, x) with times t of shape (T+1,); got {t.dtype} of "
            f"shape {t.shape} for t. Return trajectories as a list or an array."
        )
    return record


def _load(record: Any) -> np.ndarray:
    """The numbers of a record as an array, from a file if it is a path."""
    if record is None:
        raise InvalidReply(f"`acquire` returned None, where a record was expected: {FORMS}")
    if isinstance(record, str | Path):
        record = _load_file(Path(record))
    if isinstance(record, np.ma.MaskedArray):
        record = _fill_masked(record)
    try:
        x = np.asarray(record)
    except ValueError:
        raise InvalidReply(
            f"a record must be numbers of one shape; got a {type(record).__name__} of entries of "
            "several shapes"
        ) from None
    _check_dtype(x, record)
    return x.astype(np.float32) if x.dtype == np.float16 else x


def _load_file(path: Path) -> np.ndarray:
    if path.suffix != ".npy":
        raise CommandRejected(
            f"the path of a record must end in .npy; `acquire` returned {str(path)!r}. Load other "
            "files in `acquire`, and return the array."
        )
    try:
        return np.load(path, allow_pickle=False)
    except FileNotFoundError:
        raise InvalidReply(f"the record {str(path)!r} does not exist") from None
    except (ValueError, EOFError) as error:
        raise InvalidReply(f"the record {str(path)!r} cannot be read: {error}") from error


def _fill_masked(record: np.ma.MaskedArray) -> np.ndarray:
    """Masked samples as NaN, which sets their trajectories aside."""
    if record.dtype.kind in "fc":
        return record.filled(np.nan)
    if np.ma.is_masked(record):
        raise CommandRejected(
            f"a masked record must be of floating point; `acquire` returned {record.dtype}. "
            "Multiply the codes by units per code first."
        )
    return np.asarray(record)


def _check_dtype(x: np.ndarray, record: Any) -> None:
    kind = x.dtype.kind
    if kind in "fc":
        return
    if kind in "iu":
        raise CommandRejected(
            f"a record must be in units, of floating point; `acquire` returned {x.dtype}. For "
            "codes of a converter return Batch(t, codes, scale=units per code, full_scale=...); "
            "for counts return x.astype(float)."
        )
    what = f"a {type(record).__name__}" + (f" of type {x.dtype}" if x.ndim else "")
    raise CommandRejected(
        f"`acquire` must return {FORMS}; it returned {what}, which is not numbers."
    )


def _arrange(x: np.ndarray, shape: RecordShape) -> np.ndarray:
    """The samples as (E, T+1, M), real."""
    is_complex = x.dtype.kind == "c"
    if is_complex and shape.channels and shape.channels % 2:
        raise CommandRejected(
            f"a sample has {shape.channels} components, which no number of complex channels "
            f"makes; `acquire` returned {x.dtype}. Return real and imaginary parts as channels."
        )
    arranged = _add_axes(x, shape)
    if arranged is None:
        raise _refuse_shape(x, shape)
    _check_lengths(arranged.shape, shape, is_complex)
    if is_complex:
        arranged = np.concatenate([arranged.real, arranged.imag], axis=-1)
    return arranged


def _add_axes(x: np.ndarray, shape: RecordShape) -> np.ndarray | None:
    """The array with its axes of trajectories and channels; None where its shape is not clear."""
    if x.ndim == 3:
        arranged = x
    elif x.ndim == 2 and len(x) == shape.trajectories and _fits(x[..., None], shape):
        arranged = x[..., None]
    elif x.ndim == 2 and shape.trajectories == 1:
        arranged = x[None]
    elif x.ndim == 1 and shape.trajectories == 1:
        arranged = x[None, :, None]
    else:
        return None
    is_known = shape.points is not None or shape.channels is not None
    times, channels = arranged.shape[1:]
    return arranged if is_known or times > channels else None


def _fits(x: np.ndarray, shape: RecordShape) -> bool:
    """Whether (E, T+1, M) has the times and channels that are known."""
    times, channels = x.shape[1:]
    wanted = shape.count_channels(x.dtype.kind == "c")
    return channels == (wanted or channels) and times == (shape.points or times)


def _check_lengths(lengths: tuple[int, ...], shape: RecordShape, is_complex: bool = False) -> None:
    """Refuse another number of trajectories, times or channels, with what may be the reason."""
    count, times, channels = lengths
    wanted = shape.count_channels(is_complex) or channels
    points = shape.points or max(times, 2)
    if (count, times, channels) == (shape.trajectories, points, wanted):
        return
    expected = (
        f"a record must be {shape.describe(is_complex)}; got an array of shape "
        f"{(count, times, channels)}"
    )
    orders = {
        (1, 0, 2): "(times, trajectories, channels): return x.swapaxes(0, 1)",
        (0, 2, 1): "(channels, times): return x.swapaxes(-1, -2)",
    }
    for axes, text in orders.items():
        if tuple(lengths[axis] for axis in axes) == (shape.trajectories, points, wanted):
            raise CommandRejected(f"{expected}. It looks like {text}.")
    if channels != wanted:
        raise CommandRejected(
            f"{expected}. Return the channels of the model's state, in its order."
        )
    raise InvalidReply(expected)


def _refuse_shape(x: np.ndarray, shape: RecordShape) -> CommandRejected | InvalidReply:
    is_complex = x.dtype.kind == "c"
    expected = f"a record must be {shape.describe(is_complex)}"
    if shape.trajectories == 1:
        expected += ", or (times, channels), or (times,) with one channel"
    if x.ndim == 3 or (x.ndim in (1, 2) and shape.trajectories == 1):
        return CommandRejected(
            f"{expected}; got an array of shape {x.shape}, with fewer times than channels, "
            "unless its axes are in another order. Give `channels` or `t` to `make_driver`."
        )
    if x.ndim in (1, 2) and x.size:
        return CommandRejected(
            f"{expected}; got an array of shape {x.shape}. Reshape it in `acquire`."
        )
    return CommandRejected(
        f"{expected}; got {'one number' if x.ndim == 0 else f'an array of shape {x.shape}'}. "
        "A trajectory is the record of the state at several times."
    )


def check_times(t: Array) -> np.ndarray:
    """The times of a record (T+1,), strictly increasing."""
    try:
        return check.times(t)
    except ValueError as error:
        raise InvalidReply(f"the times of a record are wrong: {error}") from None


def _resolve_times(t: Any, points: int, shape: RecordShape) -> np.ndarray:
    """Times of the samples: those of the record, which must agree with what is known of them."""
    known = shape.t
    if known is None and shape.interval is not None:
        known = shape.interval * np.arange(points)
    if t is None:
        if known is None:
            raise CommandRejected(
                "the sampling times of this record are unknown. Give `t` or `interval` to "
                "`make_driver`, or return a pair (t, x)."
            )
        return known
    t = check_times(t)
    if len(t) != points:
        raise InvalidReply(f"a record of {points} samples has {len(t)} times")
    if known is not None and not _are_equal_times(t, known):
        raise CommandRejected(
            f"the samples must be taken at {_describe_times(known)}; the record has "
            f"{_describe_times(t)}. Set the instrument, or `t` of the driver."
        )
    return t if known is None else known


def _are_equal_times(t: np.ndarray, known: np.ndarray) -> bool:
    if t.shape != known.shape:
        return False
    return bool(np.all(np.abs(t - known) <= SAME_TIME * np.diff(known).min()))


def _describe_times(t: Any) -> str:
    t = np.asarray(t)
    if t.size < 2:
        return f"{t.size} times"
    return f"{t.size} times from {t[0]:.6g} to {t[-1]:.6g}"
