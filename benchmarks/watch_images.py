"""Pictures of the page for docs/watch.md, from real runs.

    python benchmarks/watch_images.py RUNS [--out docs/images]

Runs that RUNS lacks are made first, six minutes of one core for `ports`:

    moving_trap  the protocol of examples/moving_trap.py, within bounds
    ports        fluctua train ports on 3 × 4 resonators, measured in one of four iterations
    demo         fluctua insitu demo with four devices

Needs Chromium and the extras `watch` and `test`.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

EXAMPLES = Path(__file__).parents[1] / "examples"
TRAP = """
import sys
sys.path.insert(0, sys.argv[1])
import moving_trap as trap
import optax
import fluctua as fl
rule = optax.sgd(optax.cosine_decay_schedule(30.0, 60))
training = fl.Training(trap.estimator, trap.RAMP, rule, trajectories=1000, bounds=(0.0, 5.0))
fl.run(training, iterations=60, folder=sys.argv[2])
"""
PORTS = "train ports --backend cpu --seed 0 --iterations 80 --set calibration.measure_every=4"
LATTICE = "--set lattice.rows=3 --set lattice.columns=4"
DEMO = "insitu demo --set devices=4 --iterations 30 --trajectories 80"
LAST = {"moving_trap": "summary.json", "ports": "summary.json", "demo": "array.png"}
"""The file that a complete run writes last."""


class View(NamedTuple):
    """A picture: its file, a run, the element that is shown (all if empty), width and height."""

    file: str
    run: str
    element: str
    width: int = 1400
    height: int = 1400


VIEWS = (
    View("watch.png", "moving_trap", "", height=1460),
    View("watch_predictions.png", "ports", "#predictions"),
    View("watch_devices.png", "demo/settings", "#devices"),
)


def make_runs(runs: Path) -> None:
    """Make the runs that are not there; one that was interrupted is continued, or made again."""
    fluctua = [sys.executable, "-m", "fluctua"]
    ports = runs / "ports"
    begin = [*PORTS.split(), *LATTICE.split(), "--out", str(ports)]
    resume = ["train", "--resume", str(ports)]
    commands = {
        "moving_trap": [sys.executable, "-c", TRAP, str(EXAMPLES), str(runs / "moving_trap")],
        "ports": [*fluctua, *(resume if (ports / "config.toml").exists() else begin)],
        "demo": [*fluctua, *DEMO.split(), "--out", str(runs / "demo")],
    }
    runs.mkdir(parents=True, exist_ok=True)
    for name, command in commands.items():
        if (runs / name / LAST[name]).exists():
            continue
        if name == "demo":
            shutil.rmtree(runs / name, ignore_errors=True)
        subprocess.run(command, check=True)


def take_pictures(browser: Any, address: str, out: Path) -> None:
    """Open the page for each view, wait until it is drawn, and save it."""
    for view in VIEWS:
        page = browser.new_page(viewport={"width": view.width, "height": view.height})
        page.goto(address)
        page.get_by_role("button", name=view.run, exact=True).click()
        others = page.locator(f"#runs input:checked:not([aria-label='curves of {view.run}'])")
        while others.count():  # the list is made anew by each click
            others.first.click()
        page.wait_for_timeout(8000)
        path = str(out / view.file)
        if view.element:
            page.locator(view.element).screenshot(path=path)
        else:
            page.screenshot(path=path)
        page.close()


def main() -> None:
    """Make runs and pictures."""
    from playwright.sync_api import sync_playwright

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("runs", type=Path)
    parser.add_argument("--out", type=Path, default=Path("docs/images"))
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    make_runs(options.runs)
    command = [sys.executable, "-u", "-m", "fluctua", "watch", str(options.runs)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        try:
            address = next(word for line in server.stdout for word in line.split() if "://" in word)
            with sync_playwright() as driver:
                path = shutil.which("chromium") or shutil.which("google-chrome")
                browser = driver.chromium.launch(executable_path=path, args=["--no-sandbox"])
                take_pictures(browser, address, options.out)
                browser.close()
        finally:
            server.terminate()


if __name__ == "__main__":
    main()
