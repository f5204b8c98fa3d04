"""Small objects by the names that examples in docstrings use.

Examples of public names begin with a setting of docs/reference/index.md, whose code is run here;
those of internal names with a room's objects.
"""

import contextlib
import io
import re
import tempfile
from functools import cache
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax

import fluctua as fl
from fluctua import insitu, tcmt
from fluctua.insitu.bench import device
from fluctua.insitu.bench.box import Bench
from fluctua.insitu.bench.server import background
from fluctua.tcmt.conversion import kernel_spec
from public_names import find_pages
from source_counts import ROOT

COMMON = {
    "np": np,
    "jnp": jnp,
    "jax": jax,
    "optax": optax,
    "io": io,
    "fl": fl,
    "fluctua": fl,
    "insitu": insitu,
}


@cache
def trap():
    """A particle in a trap in three dimensions, simulated and recorded."""
    process = fl.Process(
        lambda th, x, t, c: -th["k"] * x, lambda th, x, t, c: th["s"] * jnp.ones(3)
    )
    objective = fl.Objective(lambda th, x: jnp.sum(x**2))
    t = jnp.linspace(0.0, 1.0, 101)
    theta, key = {"k": jnp.float32(0.8), "s": jnp.float32(0.4)}, jax.random.key(0)
    simulator = fl.simulator(process, jnp.ones(3), t)
    x = simulator(key, theta, 20).x
    return {
        "process": process,
        "objective": objective,
        "theta": theta,
        "calibrated": theta,
        "key": key,
        "t": t,
        "x": x,
        "x_next": x[0, 1],
        "simulator": simulator,
        "estimator": fl.ppgt(simulator, objective),
        "recorded": fl.Trajectories(t, x),
    }


@cache
def lattice():
    """A network of six resonators and its transmission over a short time."""
    network = tcmt.rectangular(2, 3)
    task = tcmt.transmission(network, horizon=0.2, dt=1e-2)
    key = jax.random.key(0)
    theta = tcmt.initial_parameters(key, network)
    spec = kernel_spec(task, theta)
    return {
        "network": network,
        "task": task,
        "theta": theta,
        "key": key,
        "spec": spec,
        **{n: getattr(tcmt, n) for n in tcmt.__all__},
    }


@cache
def recording_of_the_lattice():
    """Its description, and the bytes of the file."""
    world = lattice()
    description = insitu.files.describe(world["task"], world["theta"], every=1)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run.nc"
        for _ in insitu.files.record(path, world["task"], description, 40):
            pass
        return description, path.read_bytes()


def record_lattice():
    """The lattice recorded into run.nc in the current folder, and what is known of it."""
    world = lattice()
    description, content = recording_of_the_lattice()
    Path("run.nc").write_bytes(content)
    recording = insitu.files.open("run.nc")
    model = insitu.files.load_model(recording)
    known = {"process": model.process, "objective": model.objective, "theta": model.theta}
    packages = (insitu.instrument, insitu.files, insitu)
    own = {name: getattr(package, name) for package in packages for name in package.__all__}
    own["open"] = open
    arrays = {"t": np.arange(3.0), "x": np.zeros((4, 3, 2)), "omega": np.zeros(2)}
    objects = {
        "recording": recording,
        "model": model,
        "description": description,
        "diffusion": np.full(12, 0.1),
    }
    settings = device.reset_settings(device.Sheet())
    bench = {
        "settings": settings,
        "background": background,
        "Bench": Bench,
        "Description": insitu.files.Description,
        "insitu": insitu,
    }
    return world | own | known | arrays | bench | objects


ROOMS = {
    "core": trap,
    "learn": trap,
    "store": trap,
    "scale": trap,
    "tcmt": lattice,
    "runs": lattice,
    "plot": lattice,
    "paper": lattice,
    "insitu": record_lattice,
}


def find_world(module):
    """The names that the examples of a module may use."""
    names = {name: getattr(fl, name) for name in dir(fl) if not name.startswith("_")}
    room = ROOMS.get(module.split(".")[1])
    if module.startswith("fluctua.core.likelihood"):
        room = record_lattice
    return COMMON | names | (room() if room else {})


IMPORTS = "Names in the examples"
PARENTS = {"Recording": "Lattice", "Trap": IMPORTS, "Lattice": IMPORTS, "Instrument": IMPORTS}
"""Settings of docs/reference/index.md, and what each begins with itself."""


@cache
def read_settings():
    """Python of docs/reference/index.md, {heading: blocks}."""
    text = (ROOT / "docs" / "reference" / "index.md").read_text()
    sections = re.findall(r"^##+ ([^\n]*)\n(.*?)(?=^##|\Z)", text, re.MULTILINE | re.DOTALL)
    blocks = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
    return {heading: blocks.findall(section) for heading, section in sections}


@cache
def make_setting(name):
    """Names of a setting, and the files that its first block writes, {name: bytes}."""
    if name == IMPORTS:
        names, files = {}, {}
    else:
        names, files = make_setting(PARENTS[name])
    names = dict(names)
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        exec(read_settings()[name][0], names)
        files = files | {path.name: path.read_bytes() for path in Path().iterdir()}
    return names, files


def begin_example(public):
    """The names that the example of a public name begins with; their files are written here."""
    page = find_pages()[public].read_text()
    setting = re.search(r"index\.md#(\w+)", page)[1].capitalize()
    names, files = make_setting(setting)
    names = dict(names)
    for file, content in files.items():
        Path(file).write_bytes(content)
    for block in read_settings()[setting][1:]:
        exec(block, names)
    return names
