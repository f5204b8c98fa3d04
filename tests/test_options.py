"""Every option of every command, and every key of `--set`, is heeded or refused by name.

Each is given to its command in every mode of the command, and compared with the same words without
it: the library receives something else, or something else is printed or written, or the command
stops and names the option. Long computations are replaced where the command calls the library.
"""

import contextlib
import importlib
import re
import shutil
import subprocess
import webbrowser
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import click
import numpy as np
import pytest
import typer
from typer.testing import CliRunner

import fluctua.cli.advise_network
import fluctua.cli.app
import fluctua.cli.instruments.check
import fluctua.cli.instruments.demo
import fluctua.cli.trainings.network
import fluctua.cli.virtual_bench
import fluctua.insitu.bench.server
from fluctua.insitu.bench import demo, population
from fluctua.insitu.device_training import run_and_resume, station
from fluctua.insitu.device_training.plan import Plan
from fluctua.insitu.instrument_check.report import InstrumentCheck, Latency
from fluctua.insitu.recording import conversion, simulate
from fluctua.paper import panels, properties, training
from fluctua.plot import insitu as drawings
from fluctua.plot import training as plots
from fluctua.runs import advise as advice
from fluctua.runs import lattice
from fluctua.scale.cluster import Cluster
from fluctua.store import runner
from fluctua.watch import server

pytestmark = [pytest.mark.filterwarnings("ignore::RuntimeWarning"), pytest.mark.long]

OWN = """
import jax.numpy as jnp, optax, fluctua as fl
from fluctua import insitu
from fluctua.insitu.files import RecordingModel
process = fl.Process(lambda th, x: -th["k"] * x, noise=lambda th, x: jnp.array([1.0, 1.0]))
objective = fl.Objective(running=lambda th, x: x[0] ** 2)
model = RecordingModel(process, objective)
t = jnp.linspace(0, 1, 11)
estimator = fl.ppgt(fl.simulator(process, jnp.zeros(2), t), objective)
training = fl.Training(estimator, {"k": jnp.array(1.0)}, optax.adam(0.1), trajectories=4)
lab = insitu.Model(process, objective, knobs={"k": insitu.Knob(1.0, bounds=(0.0, 2.0))},
                   unknowns={}, x0=jnp.zeros(2), t=t)
def connect(timeout=1.0): ...
"""
SMALL = """
preset = "demo"
iterations = 2
[lattice]
rows = 2
columns = 2
[task]
horizon = 1.0
dt = 0.05
[ensemble]
trajectories = 4
"""

# A mode of a command: the words that it needs, without the option that is looked at.
MODES = {
    "train": {
        "preset": "demo",
        "file": "small.toml",
        "code": "own.py:training",
        "resume": "--resume run",
        "branch": "--from run",
    },
    "evaluate": {"run": "run", "params": "small.toml --params params.npz"},
    "plot": {},
    "watch": {"folder": "run"},
    "reproduce": {
        "fig1": "fig1 --runs run",
        "fig1 again": "fig1 --from-tables",
        "fig2": "fig2 --quick",
        "fig2 of runs": "fig2 --runs run",
        "fig2 again": "fig2 --from-tables",
    },
    "estimate": {
        "recording": "rec.npz --model own.py:model",
        "recordings": "rec.npz rec.npz --model own.py:model",
        "continuing": "long.npz --model own.py:model --continuing",
        "response": "long.npz --model own.py:model --continuing --response --set window=1",
        "network": "small.toml --trajectories 4",
    },
    "advise": {"recording": "rec.npz --model own.py:model", "network": "small.toml"},
    "record": {"small": "new.nc", "network": "new.nc small.toml"},
    "inspect": {"file": "rec.npz"},
    "convert": {"file": "rec.npz new.nc"},
    "calibrate": {"file": "rec.npz --model own.py:model"},
    "insitu": {
        "demo": "demo",
        "address": "train tcp://127.0.0.1:1 --out new",
        "several": "train tcp://127.0.0.1:1 tcp://127.0.0.1:2 --out new",
        "self-calibrating": "train tcp://127.0.0.1:1 --out new --calibration training",
        "code": "train own.py:connect --model own.py:lab --out new",
        "check": "check own.py:connect --model own.py:lab",
        "check address": "check tcp://127.0.0.1:1",
        "resume": "train --resume run",
    },
    "virtual-bench": {"one": "", "two": "--devices 2"},
}

# An example of every option. Where a mode has the option already, this replaces it.
EXAMPLES = {
    "--append": "",
    "--attached": "",
    "--backend": "jax",
    "--baseline": "none",
    "--calibration": "training",
    "--cluster": "local",
    "--continuing": "",
    "--detrend": "0.5",
    "--devices": "3",
    "--drop": "",
    "--error": "0.2",
    "--every": "5",
    "--fault": "drop@3",
    "--from": "run",
    "--from-tables": "",
    "--host": "::1",
    "--iterations": "7",
    "--json": "",
    "--map": "x=other",
    "--model": "own.py:model",
    "--observe": "0,1",
    "--open": "",
    "--out": "elsewhere",
    "--params": "params.npz",
    "--port": "7001",
    "--quick": "",
    "--rate": "50",
    "--readout-noise": "0.3",
    "--replace": "",
    "--response": "",
    "--resume": "run",
    "--runs": "params.npz",
    "--score": "local-linear",
    "--seed": "11",
    "--set": "task.dt=0.025",
    "--settle": "2",
    "--show": "",
    "--strict": "",
    "--trajectories": "9",
    "--watch": "",
    "--write": "",
}

# Where a mode needs another example.
OTHERS = {
    ("calibrate", "--out"): "measured.npz",
    ("convert", "--params"): "k.npz",
    ("estimate", "--params"): "k.npz",
    ("estimate network", "--params"): "params.npz",
    ("calibrate", "--params"): "k.npz",
    ("advise recording", "--params"): "k.npz",
    ("insitu", "--model"): "own.py:lab",
    ("insitu", "--set"): "points=31",
    ("insitu demo", "--set"): "fault_rate=0.1",
    ("insitu demo", "record"): "true",
    ("insitu resume", "--set"): "timeout=3",
    ("virtual-bench", "--set"): "rows=2",
    ("reproduce", "--set"): "trajectories=4096",
    ("estimate", "--set"): "noise=nominal",
    ("estimate network", "--set"): "task.dt=0.025",
    ("advise", "--set"): "pilot=20",
    ("inspect", "--set"): "dt=0.5",
    ("convert", "--set"): "dt=0.5",
    ("calibrate", "--set"): "bias=false",
}

# Heeded by an error that does not repeat the name: what else it says.
EXPLAINED = {
    "theta": "has no calibration in it",
    "--continuing": "Record for longer",
    "kerr": "calibrates as it goes needs `unknowns`",
    "sigma_kappa": "calibrates as it goes needs `unknowns`",
}

KEYS = {
    "advise": {
        "return_bias": "0.01",
        "sigma_w": "[0.1, 0.4]",
        "pilot": "20",
        "backend": "jax",
        "dt": "0.2",
        "scale": "0.5",
        "noise": "nominal",
        "theta": "calibrated",
    },
    "calibrate": {"dt": "0.2", "scale": "0.5", "bias": "false"},
    "convert": {
        "dt": "0.2",
        "scale": "0.5",
        "axes": "time,channel",
        "channels": "a,b",
        "units": "V",
        "time_units": "s",
    },
    "estimate": {
        "dt": "0.2",
        "scale": "0.5",
        "parameter": "none",
        "noise": "nominal",
        "theta": "calibrated",
        "readout_noise": "0.2",
        "window": "0.3",
        "chunk_mb": "0",
        "stride": "2",
        "period": "40",
        "fit": "k",
        "folds": "3",
        "figure": "drawn.png",
    },
    "inspect": {"dt": "0.2", "scale": "0.5"},
    "insitu": {
        "timeout": "3",
        "time_limit": "4",
        "on_doubt": "continue",
        "final_trajectories": "5",
        "learning_rate": "0.3",
        "probes": "3",
        "attempts": "2",
        "record": "false",
        "share": "parameters",
        "forget_after": "5",
        "measure_every": "2",
        "renew": "true",
        "readout_noise": "0.1",
        "check_trajectories": "3",
        "devices": "2",
        "fault_rate": "0.1",
        "figure": "drawn.png",
    },
    "reproduce": {
        "inset": "run",
        "sigma_kappa": "0.1",
        "trajectories": "4096",
        "returns": "20",
        "every": "3",
        "iteration": "1",
        "site": "1",
        "seed": "3",
        "backend": "cuda",
        "config": "demo",
    },
    "virtual-bench": {
        "rows": "2",
        "columns": "2",
        "interval": "0.02",
        "oversample": "3",
        "disorder": "0.1",
        "kappa_disorder": "0.1",
        "gain_error": "0.1",
        "ageing": "0.1",
        "ageing_shots": "10",
        "readout_noise": "0.1",
        "adc_range": "8",
        "bits": "8",
        "read": "ports",
        "fault_rate": "0.1",
    },
}


# Keys that are arguments of the functions of a driver and a model: here those of a virtual bench.
ARGUMENTS = {
    "insitu": {
        "points": "31",
        "noise": "0.12",
        "sigma_kappa": "0.1",
        "kerr": "true",
        "omega_max": "3",
        "kappa_max": "3",
    }
}


class Case(NamedTuple):
    """A command in one of its modes, and an option with its value."""

    command: str
    mode: str
    option: str
    value: str

    @property
    def name(self):
        """What the command must print if it refuses the option."""
        return self.value.partition("=")[0] if self.option == "--set" else self.option


class Outcome(NamedTuple):
    """What a command did. calls: what the library received."""

    status: int
    output: str
    calls: list[str]
    files: list[str]


class Reached(Exception):
    """The command has called the library."""


make_command = fluctua.cli.app.Commands.get_command


@cache
def make_command_once(name):
    """A command by its name; typer takes 7 ms to make one."""
    return make_command(None, None, name)


@cache
def list_options():
    """The options of every command, by their names on the command line."""
    group = typer.main.get_command(fluctua.cli.app.app)
    context = click.Context(group)
    return {
        name: {
            parameter.opts[0]
            for parameter in group.get_command(context, name).params
            if parameter.param_type_name == "option" and parameter.name != "help"
        }
        for name in group.list_commands(context)
    }


def list_keys():
    """The keys of `--set` of the commands that list them."""
    keys = {}
    for command, place in fluctua.cli.app.COMMANDS.items():
        module = importlib.import_module(f"fluctua.cli.{place.module}")
        name = f"{command.replace('-', '_').upper()}_KEYS"
        keys[command] = set(getattr(module, name, {}))
    return keys


def find_example(command, mode, option):
    for key in ((f"{command} {mode}", option), (command, option)):
        if key in OTHERS:
            return OTHERS[key]
    return EXAMPLES[option]


def list_cases(command, mode):
    options = sorted(list_options()[command])
    cases = [Case(command, mode, name, find_example(command, mode, name)) for name in options]
    for key, example in (KEYS.get(command, {}) | ARGUMENTS.get(command, {})).items():
        value = OTHERS.get((f"{command} {mode}", key), example)
        cases.append(Case(command, mode, "--set", f"{key}={value}"))
    return cases


def test_every_option_and_every_key_has_an_example():
    options = list_options()
    assert set().union(*options.values()) == EXAMPLES.keys()
    assert options.keys() == MODES.keys()
    assert {name: keys for name, keys in list_keys().items() if keys} == {
        name: set(keys) for name, keys in KEYS.items()
    }


# ----------------------------------------------------------------------------- running a command


def walk(shape):
    """Trajectories (E, T, M) with a little more noise than the model has."""
    z = np.random.default_rng(0).normal(size=shape)
    x = np.zeros(shape)
    for n in range(1, shape[1]):
        x[:, n] = 0.9 * x[:, n - 1] + 1.2 * np.sqrt(0.1) * z[:, n]
    return x


def write_files():
    """What the modes need, in the working directory."""
    for name, shape in (("rec", (60, 21, 2)), ("long", (1, 2001, 2))):
        x = walk(shape)
        t = 0.1 * np.arange(shape[1])
        np.savez(f"{name}.npz", x=x, t=t, other=0.9 * x, **{"parameters.k": np.array(1.0)})
    np.savez("params.npz", omega=np.full(4, 0.1), kappa=np.ones(4), chi=np.zeros(4))
    np.savez("k.npz", k=np.array(0.5))
    Path("own.py").write_text(OWN)
    Path("small.toml").write_text(SMALL)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with files, a recording and a short run."""
    path = tmp_path_factory.mktemp("options")
    with pytest.MonkeyPatch.context() as patch, contextlib.chdir(path):
        patch.setattr(plots, "draw_folder", lambda run: [])
        write_files()
        done = CliRunner().invoke(fluctua.cli.app.app, ["train", "small.toml", "--out", "run"])
        assert done.exit_code == 0, done.output
    return path


def clean(text):
    """A text without addresses in memory and measured times."""
    text = re.sub(r" at 0x[0-9a-f]+", "", text)
    text = re.sub(r'"seconds[^,}]*', "", text)
    return re.sub(r"[\d.]+ s\b|\d\.\d+ *$", "", text, flags=re.MULTILINE)


class Library:
    """Stands for the calls of the library that take long, and notes what they receive."""

    def __init__(self):
        self.calls = []

    def note(self, name, *values, **named):
        text = f"{name} {values!r} {sorted(named.items())!r}"
        self.calls.append(clean(" ".join(text.split())))  # a record has a line per field

    def stop(self, name):
        """A function that notes its arguments and ends the command."""

        def call(*values, **named):
            self.note(name, *values, **named)
            raise Reached

        return call

    def answer(self, name, result):
        """A function that notes its arguments and returns a result."""

        def call(*values, **named):
            self.note(name, *values, **named)
            return result

        return call

    def serve_page(self, runs, host, port, ready):
        self.note("page", runs, host, port)
        ready("http://page")

    def branch(self, source, folder, *values, **named):
        self.note("branch", source, folder, *values, **named)
        folder.mkdir(parents=True)
        shutil.copy(source / "config.toml", folder)

    def convert(self, convert, recording, out, **named):
        self.note("convert", recording.x[:2], recording.description, **named)
        return convert(recording, out, **named)

    def savefig(self, path, **named):
        self.note("figure", path)
        raise Reached

    async def serve_bench(self, server, host, port, listening):
        bench = server.bench
        self.note("bench", vars(bench), vars(bench.faults), host, port)


def open_bench(connects, attempts, report):
    """Stands for the driver of a bench that was opened."""
    sheet = fluctua.insitu.instrument.virtual.BenchDescription(
        "box", 2, 2, 0.1, 0.01, 16.0, 1e-3, sites=(0, 1, 2, 3), readout=0.0
    )
    named = connects[0].keywords
    generators = {"NOIS": named.get("noise", 0.0), "MOD": named.get("sigma_kappa", 0.0)}
    return SimpleNamespace(
        description=sheet, points=named["points"], generators=generators, close=lambda: None
    )


def replace_library(patch, library):
    lattices = [
        SimpleNamespace(task=SimpleNamespace(network=SimpleNamespace(sites=4))),
    ]
    commands = fluctua.cli.app.Commands
    patch.setattr(commands, "get_command", lambda group, context, name: make_command_once(name))
    patch.setattr(subprocess, "Popen", library.stop("page"))
    patch.setattr(webbrowser, "open", library.answer("browser", None))
    patch.setattr(server, "serve", library.serve_page)
    for name in ("run", "resume"):
        patch.setattr(lattice, name, library.answer(name, []))
    patch.setattr(lattice, "branch", library.branch)
    patch.setattr(fluctua.cli.trainings.network, "_drive", library.stop("drive"))
    patch.setattr(advice, "advise", library.answer("advise", None))
    patch.setattr(fluctua.cli.advise_network, "_print", library.stop("print"))
    patch.setattr(fluctua.cli.advise_network, "_to_json", lambda *values: {})
    patch.setattr(Cluster, "__init__", library.stop("cluster"))
    patch.setattr(conversion, "convert", partial(library.convert, conversion.convert))
    patch.setattr(fluctua.cli.instruments.demo, "_summarise", lambda result: "")
    patch.setattr(drawings, "draw_in_situ", library.answer("draw", library))
    patch.setattr(training, "write", library.stop("write"))
    patch.setattr(runner, "run", library.stop("training"))
    patch.setattr(training, "gather", library.answer("gather", None))
    patch.setattr(training, "read", library.stop("read"))
    patch.setattr(properties, "read", library.stop("read"))
    patch.setattr(training, "from_runs", library.answer("lattices", lattices))
    patch.setattr(training, "from_file", library.answer("lattices", lattices))
    patch.setattr(training, "train_small_lattice", library.answer("lattices", lattices[0]))
    patch.setattr(panels, "plan", library.answer("plan", []))
    patch.setattr(panels, "measure", library.answer("measure", []))
    patch.setattr(simulate, "record", library.stop("record"))
    patch.setattr(demo, "run", library.answer("demo", None))
    patch.setattr(population, "compare", library.stop("population"))
    patch.setattr(run_and_resume, "run", library.stop("run"))
    patch.setattr(run_and_resume, "resume", library.stop("resume"))
    plan = Plan(instruments=("tcp://127.0.0.1:1",))
    patch.setattr(run_and_resume, "read_plan", library.answer("plan", plan))
    patch.setattr(station, "open_first", open_bench)
    passed = InstrumentCheck(latency=Latency(0.0, 0.1, 0.2))
    checked = library.answer("check", passed)
    patch.setattr(fluctua.cli.instruments.check, "check_instrument", checked)
    patch.setattr(fluctua.insitu.bench.server, "serve", library.serve_bench)
    patch.setattr(fluctua.cli.virtual_bench, "_stop_when_closed", library.answer("input", None))


def list_files():
    return sorted(path.as_posix() for path in Path().rglob("*"))


def invoke(words):
    """Run a command and remove what it has written."""
    before = list_files()
    library = Library()
    with pytest.MonkeyPatch.context() as patch:
        replace_library(patch, library)
        done = CliRunner().invoke(fluctua.cli.app.app, words)
    if done.exception is not None and not isinstance(done.exception, Reached | SystemExit):
        raise done.exception
    new = sorted(set(list_files()) - set(before))
    for path in reversed(list(map(Path, new))):
        path.rmdir() if path.is_dir() else path.unlink()
    return Outcome(done.exit_code, clean(done.output), library.calls, new)


@cache
def invoke_once(*words):
    return invoke(list(words))


def strip_option(words, option):
    """The words without an option and its value."""
    place = words.index(option)
    with_value = bool(EXAMPLES[option])
    return [*words[:place], *words[place + 1 + with_value :]]


def is_heeded(case):
    """Whether an option changes what its command does, or is refused by name."""
    mode = MODES[case.command][case.mode].split()
    if case.option in mode:
        words = mode
        without = strip_option(mode, case.option)
    else:
        words = [*mode, case.option, *([case.value] if case.value else [])]
        without = mode
    expected = invoke_once(case.command, *without)
    outcome = invoke([case.command, *words])
    if outcome.status == 2 and expected.status != 2:
        names = [name.strip("-") for name in (case.name, case.option)]
        names.append(EXPLAINED.get(case.name, case.name))
        return any(name in outcome.output for name in names)
    return outcome != expected


@pytest.mark.parametrize(
    ("command", "mode"), [(command, mode) for command in MODES for mode in MODES[command]]
)
def test_every_option_is_heeded_or_refused(command, mode, folder):
    with contextlib.chdir(folder):
        ignored = {case for case in list_cases(command, mode) if not is_heeded(case)}
    assert not ignored
