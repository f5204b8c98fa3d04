"""Summary of a lattice's run: evaluated once more, written as text and as JSON."""

from __future__ import annotations

from typing import Any

import numpy as np

from fluctua.core.words import format_count
from fluctua.runs.build import FAMILIES, make_estimator, make_network, make_task
from fluctua.runs.conditions import is_unknown
from fluctua.runs.config import Config
from fluctua.runs.evaluate import evaluate, load_parameters
from fluctua.store import checkpoint, history
from fluctua.store import summary as summaries
from fluctua.store.folder import RunFolder

MIN_COVER = 0.8
"""Share of predictions within two standard errors, 95 % expected, below which they do not cover."""

FINER = 2
"""Factor by which the steps of the second evaluation are smaller."""


def conclude(place: RunFolder, config: Config) -> dict[str, Any]:
    """Evaluate the final parameters, write summary.txt and summary.json, and return the summary."""
    rows = history.read(place.history)
    if not rows:
        return {}
    summary = gather_numbers(place, config, rows)
    summaries.write(place, summary, format_summary(summary))
    return summary


def gather_numbers(place: RunFolder, config: Config, rows: list[history.Row]) -> dict[str, Any]:
    """The numbers of a summary."""
    theta = load_parameters(place.final, make_network(config))
    count = min(max(rows[-1].ensemble, 256), 2000)
    final, finer = (
        evaluate(config, theta, trajectories=count, seed=config.seed, dt=dt)._asdict()
        for dt in (config.task.dt, config.task.dt / FINER)
    )
    if is_unknown(config):
        model = _summarise_calibration(place, config)
    else:
        model = _summarise_twin(place, config, theta)
    return {
        **summaries.summarise_rows(rows),
        "final": final,
        "finer": finer,
        **summaries.compare_steps(final, finer),
        "escalations": sum("escalate" in row.event for row in rows),
        "rewinds": sum("rewind" in row.event for row in rows),
        "backend": config.backend,
        "bounds": {name: list(getattr(config.bounds, name)) for name in FAMILIES},
        "at_bounds": {
            name: _measure_share_at_bound(theta[name], *getattr(config.bounds, name))
            for name in FAMILIES
        },
        # J of a row without trajectories is the model's
        **summaries.find_fall(
            [row for row in history.effective(rows) if row.ensemble],
            final,
            config.baseline.kind == "twin",
        ),
        **model,
        "how": describe_method(config),
    }


KNOWN = {
    "twin": "the exact model as twin",
    "carried": "no model beyond the score's, carried baseline",
    "time": "no model beyond the score's, time-only baseline",
    "binned": "no model beyond the score's, binned baseline",
    "none": "no model beyond the score's, no baseline",
}


def describe_method(config: Config) -> str:
    """The method of a run: what its estimator knew, and the rule."""
    name = config.optimiser.rule
    rule = "the paper's rule" if name == "paper" else name.capitalize()
    if is_unknown(config):
        read = {"all": "", "ports": ", read at input and output", "output": ", read at the output"}
        return (
            f"the structure alone{read[config.device.read]}, calibrated on the trajectories that "
            f"are rewarded, {rule}"
        )
    return f"{KNOWN[config.baseline.kind]}, {rule}; exact score"


def format_summary(summary: dict[str, Any]) -> str:
    """The summary as text."""
    lines = [
        *summaries.format_values(summary),
        f"{summaries.format_training(summary)} on the {summary['backend']} backend",
        f"how        {summary['how']}",
    ]
    if summary["escalations"]:
        lines.append(
            f"schedule   {format_count(summary['escalations'], 'escalation')}, "
            f"{summary['rewinds']} of them with a rewind"
        )
    bounds = (
        f"{name} in [{low:g}, {high:g}] ({summary['at_bounds'][name]:.0%} there)"
        for name, (low, high) in summary["bounds"].items()
    )
    lines.append("bounds     " + ", ".join(bounds))
    lines += summaries.format_peak(summary)
    if "twin" in summary:
        each = (
            f"{name} {row['rms']:.1e} (±{row['error']:.1e})"
            for name, row in summary["twin"].items()
        )
        lines.append(f"twin       its error in the gradient, rms: {', '.join(each)}")
    if "calibration" in summary:
        known = summary["calibration"]
        each = (
            f"{name} {row['error']:.1e} (±{row['stderr']:.1e})"
            for name, row in known["families"].items()
        )
        lines.append(
            f"unknowns   rms error after {format_count(known['trajectories'], 'trajectory')}: "
            f"{', '.join(each)}"
        )
        pulls = ", ".join(f"{name} {row['pull']:.2g}" for name, row in known["families"].items())
        lines.append(f"cover      rms of error over its error bar, 1 expected: {pulls}")
        if "predictions" in known:
            score = known["predictions"]
            caveat = "" if score["covered"] >= MIN_COVER else " (too few: its errors are too small)"
            lines.append(
                f"predicted  J of the last {score['number']} measurements beforehand: rms error "
                f"{score['error']:.3f}, {score['covered']:.0%} within two standard errors{caveat}; "
                f"records: chi² per sample {score['misfit']:.3g}, 1 expected"
            )
        if known["watched"]:
            chi2 = known["watched"]["chi2"]
            expected = known["watched"]["expected"]
            lines.append(
                f"structure  chi² of what the model leaves out: {chi2:,.0f}, {expected} if it were "
                "not there"
            )
        if known["caveat"]:
            lines.append(f"caveat     {known['caveat']}")
    return "\n".join([*lines, ""])


def _read_memory(place: RunFolder) -> dict[str, np.ndarray]:
    """The state of the estimator in the newest checkpoint."""
    readable = checkpoint.read_newest(place.checkpoints, lambda text: None)
    arrays = {} if readable is None else readable[1]
    return {
        name.removeprefix("estimator/"): v
        for name, v in arrays.items()
        if name.startswith("estimator/")
    }


def _summarise_calibration(place: RunFolder, config: Config) -> dict[str, Any]:
    """Calibrated unknowns of a device, with their true errors."""
    from fluctua.learn.predictions import score_predictions
    from fluctua.learn.self_calibrating import SelfCalibrating
    from fluctua.runs.ports import group_noise
    from fluctua.runs.unknown import draw_hidden_errors

    memory = _read_memory(place)
    task = make_task(config)
    estimator = make_estimator(config, task)
    if not memory or not isinstance(estimator, SelfCalibrating):
        return {}
    estimator.restore(memory)
    known = estimator.calibration
    true = draw_hidden_errors(config, task.network)
    predictions = {}
    if estimator.predictions:
        true["noise"] = group_noise(true["noise"], task.network)
        predictions = {"predictions": score_predictions(estimator.predictions)._asdict()}

    def rms(v):
        return float(np.sqrt(np.mean(np.square(v))))

    families = {}
    for name, value in known.unknown.items():
        error = value - true[name]
        stderr = known.stderr[name]
        families[name] = {"error": rms(error), "stderr": rms(stderr), "pull": rms(error / stderr)}
    watched = (
        {"chi2": known.watched_chi2, "expected": known.watched_degrees}
        if known.watched_degrees
        else None
    )
    return {
        "calibration": {
            "trajectories": known.trajectories,
            "families": families,
            "watched": watched,
            "widened": known.widened,
            "caveat": known.caveat,
            **predictions,
        }
    }


def _summarise_twin(place: RunFolder, config: Config, theta: dict[str, Any]) -> dict[str, Any]:
    """The certificate of a run with a twin, family by family, from its newest checkpoint."""
    memory = _read_memory(place) if config.baseline.kind == "twin" else {}
    if not memory:
        return {}
    from fluctua.learn.shrunk_correction import read_certificate

    certificate = read_certificate(memory, theta)

    def rms(v):
        # not relative to the gradient, which vanishes at the end
        return float(np.sqrt(np.mean(np.square(v))))

    return {
        "twin": {
            name: {
                "rms": rms(certificate.correction[name]),
                "error": rms(certificate.stderr[name]),
                "chi2": chi2,
            }
            for name, _, _, chi2 in certificate.rows
        }
    }


def _measure_share_at_bound(values: Any, low: float, high: float) -> float:
    """Share of the values that are at one of their bounds."""
    array = np.asarray(values)
    if not array.size:
        return 0.0
    return float(np.mean((array <= np.float32(low)) | (array >= np.float32(high))))
