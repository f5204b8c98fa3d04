"""A measured colloid driven round a ring: its response in time, two ways from the same record.

    python benchmarks/colloid.py CHECKOUT [--out results/colloid]

CHECKOUT is a clone of softmatterlab/OpticalTweezersTutorial: 39 × 9,999 angles at 150 Hz in
`trajNESS_data.txt`. χ(t) of ⟨sin θ⟩ to the amplitude of the potential is
estimated from scores (`fl.response`), over several strides, and from correlations by the
generalised fluctuation–dissipation theorem, as NESSFDT_Fig28.m of the checkout does
(`colloid_methods.py` has both). The program takes the local velocity at the later time, the theorem
at the time of the perturbation: both are computed ("program" and "theorem"), and compared with the
exact response on simulated copies of the record. The drift is compared with
StochasticForceInference (`pip install StochasticForceInference`), if it is installed. Writes
response.csv, strides.csv, drift.csv, copies.csv and colloid.png.
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import matplotlib.pyplot as plt
import numpy as np

from colloid_methods import (
    NOMINAL_D,
    TURN,
    Correlations,
    Ring,
    at_times,
    correlate_increments,
    exact_correlations,
    exact_response,
    infer_by_sfi,
    make_waves,
    resample,
    respond_by_correlations,
    respond_by_scores,
    simulate_ring,
)
from fluctua.plot import style
from machine import describe_machine

RECORD = (
    "sec_4_5_statistical_physics/Fluctuation_dissipation_relation_for_NESS/data/trajNESS_data.txt"
)
DT = 1 / 150
WINDOW = 12.0
TIMES = (1, 2, 3, 5, 8, 10, 12)
STRIDES = (1, 2, 4, 8, 16)
STRIDE = 4
HARMONICS = 4
OTHER_HARMONICS = (3, 6)
FILTER = 0.085
"""Share of the sample before in a tracked position of the copies: their increments then correlate
as those of the record."""

GROUPS = 13


def read_record(checkout: Path) -> np.ndarray:
    """Angles, not reduced to a turn. (39, 9999)"""
    path = checkout / RECORD
    if not path.is_file():
        raise SystemExit(
            f"{path} is missing: give a clone of softmatterlab/OpticalTweezersTutorial."
        )
    return np.loadtxt(path, skiprows=1)[:, :-1].T  # the program skips the first line as well


def compare_copies(ring: Ring, copies: int, shape: tuple[int, int]) -> list[list[Any]]:
    """Both methods on simulated copies of the record, tracked by a filter, beside the exact χ.

    Rows: time, exact χ, what the program's form gives without noise, then mean and scatter of
    theorem, program and scores, and the error that the scores have.
    """
    times = np.array(TIMES)
    exact = exact_response(ring, DT, round(WINDOW / DT))
    found: dict[str, list] = {"theorem": [], "program": [], "scores": [], "error": []}
    for seed in range(copies):
        x = simulate_ring(ring, DT, shape[1] + 1, shape[0], seed)
        x = (1 - FILTER) * x[:, 1:] + FILTER * x[:, :-1]
        correlations = respond_by_correlations(x, DT)
        places = np.round(times / DT).astype(int)
        found["theorem"].append(correlations.theorem[places])
        found["program"].append(correlations.program[places])
        answer = respond_by_scores(x, DT, STRIDE, HARMONICS, WINDOW)
        chi, error = at_times(answer, "amplitude", times)
        found["scores"].append(chi)
        found["error"].append(error)
        print(f"copy {seed}: correlation of increments {correlate_increments(x):.3f}", flush=True)
    columns = [times, np.interp(times, DT * np.arange(len(exact)), exact)]
    columns.append(exact_correlations(ring, times).program)
    for name in ("theorem", "program", "scores"):
        columns += [np.mean(found[name], axis=0), np.std(found[name], axis=0, ddof=1)]
    columns.append(np.sqrt(np.mean(np.square(found["error"]), axis=0)))
    return [[f"{value:.5g}" for value in row] for row in zip(*columns, strict=True)]


class Findings(NamedTuple):
    """All that is drawn.

    t: of the correlations. correlations, errors: of the record, and of theorem and program.
    answers: by (stride, harmonics). rival: of `infer_by_sfi`, or None. copies: rows.
    """

    t: np.ndarray
    correlations: Correlations
    errors: np.ndarray
    answers: dict[tuple[int, int], Any]
    rival: tuple | None
    copies: list


def measure_systematic(
    answers: dict[tuple[int, int], Any], name: str, times: Sequence[float]
) -> np.ndarray:
    """Half of the spread of χ over strides from 2 on and over numbers of harmonics."""
    curves = [at_times(a, name, times)[0] for (stride, _), a in answers.items() if stride > 1]
    return np.ptp(curves, axis=0) / 2


def paired_error(x: np.ndarray, times: np.ndarray, stride: int) -> tuple[np.ndarray, np.ndarray]:
    """χ from scores minus χ of the theorem on the same traces, and its error. (len(times),) each

    The error is a jackknife over groups of traces, fits and densities made anew each time.
    """
    places = np.round(times / DT).astype(int)

    def difference(traces: np.ndarray) -> np.ndarray:
        chi, _ = at_times(
            respond_by_scores(traces, DT, stride, HARMONICS, WINDOW), "amplitude", times
        )
        return chi - respond_by_correlations(traces, DT).theorem[places]

    groups = np.arange(len(x)) % GROUPS
    parts = np.array([difference(x[groups != g]) for g in range(GROUPS)])
    error = np.sqrt((GROUPS - 1) * np.mean((parts - parts.mean(axis=0)) ** 2, axis=0))
    return difference(x), error


def write_table(path: Path, head: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    with open(path, "w", newline="") as stream:
        table = csv.writer(stream, lineterminator="\n")
        table.writerow(head)
        table.writerows(rows)


def draw(findings: Findings, path: Path) -> None:
    """Response, drift, response and D by stride, and simulated copies."""
    main = findings.answers[STRIDE, HARMONICS]
    scores, theorem, program = "#332288", "#117733", "#882255"
    with plt.rc_context(style.LOOK):
        figure, axes = plt.subplots(2, 2, figsize=(style.WIDTH, 5.0))
        a, b, c, d = axes.ravel()
        inside = findings.t <= WINDOW
        grid = main.t
        chi, error = at_times(main, "amplitude", grid)
        extra = measure_systematic(findings.answers, "amplitude", grid)
        total = np.hypot(error, extra)
        a.fill_between(grid, chi - total, chi + total, color=scores, alpha=0.25, lw=0)
        a.plot(grid, chi, color=scores, label="scores (fl.response)")
        for name, colour, row in (("theorem", theorem, 0), ("program", program, 1)):
            curve = getattr(findings.correlations, name)[inside]
            spread = findings.errors[row][inside]
            t = findings.t[inside]
            a.fill_between(t, curve - spread, curve + spread, color=colour, alpha=0.15, lw=0)
            a.plot(t, curve, color=colour, label=f"correlations, {name}")
        a.set(xlabel="t (s)", ylabel="χ(t) of ⟨sin θ⟩", xlim=(0, WINDOW), ylim=(0, 0.085))
        a.legend(loc="upper right")
        style.letter(a, "a")
        angle = np.linspace(0, TURN, 200)
        waves = make_waves(angle, HARMONICS)
        b.plot(angle, waves @ np.asarray(main.theta["force"]), color=scores, label="fluctua")
        if findings.rival is not None:
            b.plot(angle, waves @ findings.rival[0], "--", color="k", label="SFI 2.0.4")
        b.axhline(0, color="0.8", lw=0.6)
        b.set(xlabel="θ", ylabel="drift (rad/s)", xlim=(0, TURN))
        b.legend()
        style.letter(b, "b")
        strides = [stride for stride, h in findings.answers if h == HARMONICS]
        fits = [findings.answers[stride, HARMONICS] for stride in strides]
        values = [float(f.theta["D"]) for f in fits]
        errors = [float(f.theta_stderr["D"]) for f in fits]
        c.errorbar(strides, values, errors, fmt="o", ms=3, color=scores, label="fitted D")
        c.axhline(NOMINAL_D, color="0.6", lw=0.8, label="nominal D")
        c.set(xlabel="stride (samples)", ylabel="D (rad²/s)", xscale="log", xticks=strides)
        c.set_xticklabels([str(stride) for stride in strides])
        c.minorticks_off()
        c.legend()
        style.letter(c, "c")
        rows = np.array(findings.copies, float)
        d.plot(rows[:, 0], rows[:, 1], color="k", label="exact")
        d.plot(rows[:, 0], rows[:, 2], ":", color=program, label="program, without noise")
        for k, (name, colour) in enumerate(
            (("theorem", theorem), ("program", program), ("scores", scores))
        ):
            place = rows[:, 0] + 0.12 * (k - 1)
            d.errorbar(
                place,
                rows[:, 3 + 2 * k],
                rows[:, 4 + 2 * k],
                fmt="o",
                ms=3,
                color=colour,
                label=name,
            )
        d.set(
            xlabel="t (s)",
            ylabel="χ(t) of simulated copies",
            xlim=(0, WINDOW + 0.5),
            ylim=(0, 0.12),
        )
        d.legend(ncols=2, loc="upper right")
        style.letter(d, "d")
        figure.tight_layout()
        figure.savefig(path, dpi=150)
        plt.close(figure)


def analyse(x: np.ndarray, copies: int, out: Path) -> Findings:
    """Everything from the record, with its tables."""
    times = np.array(TIMES)
    places = np.round(times / DT).astype(int)
    print(f"neighbouring increments correlate by {correlate_increments(x):.3f}")
    halves = np.array_split(np.sin(x), 2, axis=1)
    for label, half in zip(("first", "second"), halves, strict=True):
        means = half.mean(axis=1)
        error = means.std(ddof=1) / np.sqrt(len(means))
        print(f"mean of sin θ, {label} half: {means.mean():.3f} ± {error:.3f}")
    correlations = respond_by_correlations(x, DT)
    kept = round(WINDOW / DT) + 1
    errors = resample(
        x,
        lambda traces: np.array(respond_by_correlations(traces, DT)[:2])[:, :kept],
    )
    errors = np.pad(errors, ((0, 0), (0, x.shape[1] - kept)))
    answers = {}
    settings = [(stride, HARMONICS) for stride in STRIDES]
    settings += [(STRIDE, harmonics) for harmonics in OTHER_HARMONICS]
    rows = []
    for stride, harmonics in settings:
        answer = respond_by_scores(x, DT, stride, harmonics, WINDOW)
        answers[stride, harmonics] = answer
        chi, error = at_times(answer, "amplitude", times)
        field, field_error = at_times(answer, "field", times)
        cause = answer.residuals.cause if answer.residuals is not None else ""
        rows.append(
            [stride, harmonics, f"{float(answer.theta['D']):.5f}"]
            + [f"{float(answer.theta_stderr['D']):.5f}"]
            + [f"{v:.5f}" for pair in zip(chi, error, strict=True) for v in pair]
            + [f"{v:.4f}" for pair in zip(field, field_error, strict=True) for v in pair]
            + [cause]
        )
        print(*rows[-1], flush=True)
    head = ["stride", "harmonics", "D", "D_stderr"]
    for name in ("chi", "chi_per_field"):
        head += [f"{name}_{t}s{end}" for t in TIMES for end in ("", "_stderr")]
    write_table(out / "strides.csv", [*head, "residuals"], rows)
    main = answers[STRIDE, HARMONICS]
    chi, error = at_times(main, "amplitude", times)
    extra = measure_systematic(answers, "amplitude", times)
    gap, gap_error = paired_error(x, times, 2 * STRIDE)
    columns = [times, chi, error, at_times_sampling(main, times), extra]
    columns += [correlations.theorem[places], errors[0][places]]
    columns += [correlations.program[places], errors[1][places], correlations.equilibrium[places]]
    columns += [gap, gap_error, *at_times(main, "field", times)]
    columns.append(measure_systematic(answers, "field", times))
    head = ["t", "scores", "stderr", "sampling_stderr", "systematic", "theorem", "theorem_stderr"]
    head += ["program", "program_stderr", "equilibrium", "scores_minus_theorem", "its_stderr"]
    head += ["scores_per_field", "per_field_stderr", "per_field_systematic"]
    rows = [[f"{value:.5g}" for value in row] for row in zip(*columns, strict=True)]
    write_table(out / "response.csv", head, rows)
    for row in rows:
        print(*row, flush=True)
    rival = compare_drift(x, main, out)
    ring = Ring(np.asarray(main.theta["force"]), float(main.theta["D"]))
    table = compare_copies(ring, copies, x.shape)
    head = [
        "t",
        "exact",
        "exact_program",
        "theorem",
        "theorem_scatter",
        "program",
        "program_scatter",
    ]
    write_table(out / "copies.csv", [*head, "scores", "scores_scatter", "scores_stderr"], table)
    for row in table:
        print(*row, flush=True)
    return Findings(DT * np.arange(x.shape[1]), correlations, errors, answers, rival, table)


def at_times_sampling(answer: Any, times: np.ndarray) -> np.ndarray:
    """Error of χ if drift and D were known."""
    return np.interp(times, answer.t, np.asarray(answer.sampling_stderr["amplitude"]))


def compare_drift(x: np.ndarray, main: Any, out: Path) -> tuple | None:
    """Coefficients of the drift beside those of StochasticForceInference, if it is installed."""
    try:
        rival = infer_by_sfi(x[:, ::STRIDE], STRIDE * DT, HARMONICS)
    except ImportError:
        print("StochasticForceInference is not installed: no second drift")
        return None
    labels = ["1", *(f"{f} {k}θ" for k in range(1, HARMONICS + 1) for f in ("cos", "sin"))]
    own = np.asarray(main.theta["force"])
    own_error = np.asarray(main.theta_stderr["force"])
    rows = [
        [label, *(f"{value:.4f}" for value in row)]
        for label, *row in zip(labels, own, own_error, rival[0], rival[1], strict=True)
    ]
    D, error = (float(tree["D"]) for tree in (main.theta, main.theta_stderr))
    rows.append(["D", f"{D:.5f}", f"{error:.5f}", f"{rival[2]:.5f}", ""])
    write_table(out / "drift.csv", ["term", "fluctua", "stderr", "sfi", "sfi_stderr"], rows)
    for row in rows:
        print(*row, flush=True)
    return rival


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--copies", type=int, default=10, help="simulated copies of the record")
    parser.add_argument("--out", type=Path, default=Path("results/colloid"))
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    jax.config.update("jax_enable_x64", True)
    print(describe_machine("cpu"))
    draw(
        analyse(read_record(options.checkout), options.copies, options.out),
        options.out / "colloid.png",
    )


if __name__ == "__main__":
    main()
