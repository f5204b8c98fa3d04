"""`fluctua estimate --continuing --response`: the response in time, its table and its picture."""

from __future__ import annotations

import json
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np

from fluctua.cli.common import Output, say, to_json
from fluctua.cli.files import report_residuals
from fluctua.insitu import response_files
from fluctua.insitu.pooling import EstimateOptions
from fluctua.processes.response_report import StepResponse
from fluctua.store import tables


def read_response_options(keys: dict[str, Any]) -> response_files.ResponseOptions:
    """Read the options of a response from the keys of --set."""
    strides = keys.get("stride", [1])
    if any(int(stride) != stride or stride < 1 for stride in strides):
        raise ValueError(f"--set stride takes whole numbers of samples; got {strides}.")
    fitted = tuple(filter(None, map(str.strip, keys.get("fit", "").split(","))))
    if "folds" in keys and not fitted:
        raise ValueError("--set folds needs a fit: give --set fit=NAME,NAME too.")
    return response_files.ResponseOptions(
        strides=tuple(int(stride) for stride in strides),
        periods=tuple(keys.get("period", ())),
        fitted=fitted,
        folds=keys.get("folds", 5),
    )


def check_outputs(out: Path | None, keys: dict[str, Any]) -> None:
    """Refuse files of a format that cannot be written."""
    if out is not None and out.suffix not in (".csv", ".npz"):
        raise ValueError(f"--out takes a .csv or an .npz file with --response; got {out}.")
    figure = keys.get("figure")
    if figure is not None and Path(figure).suffix not in (".png", ".pdf", ".svg"):
        raise ValueError(f"--set figure takes a .png, .pdf or .svg file; got {figure!r}.")


def estimate_response(
    paths: list[Path], options: EstimateOptions, keys: dict[str, Any], output: Output
) -> None:
    """Estimate the response from all files together; print it, write table and picture."""
    started = time.perf_counter()
    chosen = read_response_options(keys)
    check_outputs(output.out, keys)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "the trajectories are not those of the")
        result = response_files.estimate_file_response(paths, options, chosen)
    answer = result.comparison.responses[0]
    seconds = time.perf_counter() - started
    written = _write(answer, output.out, keys.get("figure"))
    if output.as_json:
        say(json.dumps(to_json(_gather_numbers(result, seconds))))
    else:
        say(answer._replace(residuals=None))  # printed below, on stderr
        if len(chosen.strides) > 1:
            say("by stride of the score:")
            say(result.comparison)
        for line in result.notes:
            say(line)
        say("; ".join([f"{seconds:.1f} s, {result.transition} score", *written]))
    report_residuals(output.strict, answer.residuals)


def _write(answer: StepResponse, out: Path | None, figure: str | None) -> list[str]:
    """Write the table and the picture; return what to print about them."""
    written = []
    if out is not None:
        columns: dict[str, Any] = dict(answer.tabulate())
        if out.suffix == ".csv":
            header = {"J": answer.value, "J_stderr": answer.value_stderr, "stride": answer.stride}
            tables.write(out, columns, header)
        else:
            out.parent.mkdir(parents=True, exist_ok=True)
            np.savez(out, **columns)
        written.append(f"written to {out}")
    if figure is not None:
        from fluctua.plot.response import draw_response

        Path(figure).parent.mkdir(parents=True, exist_ok=True)
        draw_response(answer).savefig(figure, dpi=150)
        written.append(f"drawn in {figure}")
    return written


def _gather_numbers(result: response_files.FileResponse, seconds: float) -> dict[str, Any]:
    """Gather the numbers of --json: one entry per stride."""
    strides = [
        {
            "stride": answer.stride,
            "columns": answer.tabulate(),
            "theta": answer.theta,
            "theta_stderr": answer.theta_stderr,
            "fitted": answer.fitted,
            "fold_values": answer.fold_values,
            "batches": answer.batches,
            "memory": answer.memory,
            "residuals": answer.residuals,
        }
        for answer in result.comparison.responses
    ]
    first = result.comparison.responses[0]
    return {
        "J": first.value,
        "J_stderr": first.value_stderr,
        "responses": strides,
        "transition": result.transition,
        "used": result.notes,
        "seconds": seconds,
    }
