"""Records in terminals and notebooks: one set of rows, as text and as HTML."""

import dataclasses
import functools
import re
from collections.abc import Callable
from html import unescape
from typing import NamedTuple
from xml.etree import ElementTree

import h5py
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fluctua as fl
from fluctua import insitu
from fluctua.core.display import html, records
from fluctua.core.display.estimates import MAX_ROWS
from fluctua.core.display.fields import describe_fields, show_fields
from fluctua.core.words import format_count
from fluctua.insitu.instrument_check.report import InstrumentCheck
from fluctua.learn.evaluate import Evaluation


def drift(theta, x):
    return -theta["k"] * x


def noise(theta, x):
    return jnp.ones(2)


PROCESS = fl.Process(drift, noise)


def parse(text):
    """The HTML as a tree, which it is only if it is well formed."""
    return ElementTree.fromstring(f"<main>{text}</main>")


def read_cells(text):
    return [["".join(cell.itertext()) for cell in row] for row in parse(text).iter("tr")]


def make_estimate(count=500, **changes):
    g = {"a": jnp.array(2.0), "b": jnp.array([1.0, -3.0])}
    e = {"a": jnp.array(0.5), "b": jnp.array([0.1, 0.2])}
    low = jax.tree.map(lambda v, s: v - 2 * s, g, e)
    high = jax.tree.map(lambda v, s: v + 2 * s, g, e)
    ends = (jnp.array(0.23), jnp.array(0.27))
    value, error = jnp.array(0.25), jnp.array(0.01)
    return fl.Estimate(g, e, g, value, error, count, (low, high), ends)._replace(**changes)


# ---------------------------------------------------------------------------------------- estimates


def test_an_estimate_is_the_same_in_both_forms():
    estimate = make_estimate()
    assert repr(estimate) == (
        "J = 0.250 ± 0.010   [0.230, 0.270]   (500 trajectories)\n"
        "  ∂J/∂a    = 2.00 ± 0.50   [1.00, 3.00]\n"
        "  ∂J/∂b[0] = 1.00 ± 0.10   [0.80, 1.20]\n"
        "  ∂J/∂b[1] = -3.00 ± 0.20   [-3.40, -2.60]\n"
        "  ±: standard error; […]: 95 %, corrected for skewness and tails of the samples "
        "(Hall, Student)"
    )
    text = estimate._repr_html_()
    assert read_cells(text) == [
        ["", "value ± standard error", "95 %"],
        ["J", "0.250 ± 0.010", "[0.230, 0.270]"],
        ["∂J/∂a", "2.00 ± 0.50", "[1.00, 3.00]"],
        ["∂J/∂b[0]", "1.00 ± 0.10", "[0.80, 1.20]"],
        ["∂J/∂b[1]", "-3.00 ± 0.20", "[-3.40, -2.60]"],
    ]
    assert "500 trajectories" in text
    assert "corrected for skewness" in text


@pytest.mark.parametrize(
    ("number", "noun", "text"),
    [
        (1, "trajectory", "1 trajectory"),
        (0, "trajectory", "0 trajectories"),
        (2000, "trajectory", "2,000 trajectories"),
        (1, "batch", "1 batch"),
        (2, "batch", "2 batches"),
        (2, "setting", "2 settings"),
    ],
)
def test_a_counted_noun_has_its_plural(number, noun, text):
    assert format_count(number, noun) == text


def test_records_of_one_trajectory_have_no_plural():
    one = make_estimate(1, interval=None, value_interval=None)
    evaluation = Evaluation(0.5, np.nan, np.nan, 1, 0.1)
    texts = [repr(one), one._repr_html_(), repr(evaluation)]
    assert all("1 trajectory" in text and "trajectories" not in text for text in texts)


def test_without_intervals_there_is_no_column_for_them():
    text = make_estimate(20, interval=None, value_interval=None)._repr_html_()
    assert {len(row) for row in read_cells(text)} == {2}
    assert "hold as little as 60 %" in text


def test_remarks_and_warnings_are_part_of_both():
    few = make_estimate(10, stopped=0.4)
    for text in (repr(few), unescape(few._repr_html_())):
        assert "40.0% of the trajectories stopped before the horizon" in text
        assert "widened, because 10 samples show little" in text


def test_of_many_parameters_a_few_rows_and_a_table_of_arrays_are_shown():
    g = {"kappa": jnp.arange(200.0).reshape(20, 10), "omega": jnp.zeros(3), "s": jnp.array(-3.0)}
    e = jax.tree.map(jnp.ones_like, g)
    estimate = fl.Estimate(g, e, g, jnp.array(0.25), jnp.array(0.01), 500)
    rows = read_cells(estimate._repr_html_())
    assert sum(row[0].startswith("∂J/∂") for row in rows) == MAX_ROWS
    assert ["kappa", "20 × 10", "197 of 200", "199.0 ± 1.0 at [19, 9]"] in rows
    assert ["omega", "3", "0 of 3", "0.0 ± 1.0 at [0]"] in rows
    assert "204 components in all" in estimate._repr_html_()
    assert len(estimate._repr_html_()) < 10_000


def test_names_are_escaped_and_colours_are_those_of_the_page():
    wild = '<script>alert("x")</script>&\x1b[2J'
    estimate = fl.Estimate(
        *({wild: jnp.ones(2)},) * 3, value=jnp.array(0.0), value_stderr=jnp.array(0.1), count=60
    )
    trajectories = fl.Trajectories(np.arange(3.0), np.zeros((2, 3, 1)), {wild: np.zeros(2)})
    for text in (estimate._repr_html_(), trajectories._repr_html_()):
        assert "<script" not in text
        assert "\x1b" not in text
        assert "&lt;script&gt;" in text
        assert not re.search(r"#[0-9a-f]{3}|rgb|(?<!current)(?<!current)color:(?!inherit)", text)


# ---------------------------------------------------------------------------- processes and rewards


def test_a_process_shows_its_functions_and_its_step():
    process = fl.Process(drift, lambda theta, x: jnp.ones(2), noiseless=(0,), integrator="heun")
    assert repr(process) == (
        "Process(drift=drift, noise=<lambda>, noiseless=(0,), integrator='heun')"
    )
    assert read_cells(process._repr_html_()) == [
        ["drift", "drift(theta, x)"],
        ["noise", "lambda(theta, x)"],
        ["noiseless", "(0,)"],
        ["integrator", "heun"],
    ]


def test_functions_are_named_as_they_were_written():
    checked = fl.simulator(PROCESS, jnp.zeros(2), jnp.linspace(0, 1, 3)).recipe.process
    assert repr(checked) == repr(PROCESS)
    bound = functools.partial(drift, {"k": 2.0})
    assert "drift=partial(drift)" in repr(fl.Process(bound, noise))
    product = fl.NoiseProduct(lambda theta, x, t, context, dw: dw, width=3)
    assert "noise=NoiseProduct(product=<lambda>, width=3)" in repr(fl.Process(drift, product))
    exact = fl.integrators.Exponential(lambda theta: jnp.array([-1.0, -1.0]))
    assert "integrator=Exponential" in repr(fl.Process(drift, noise, integrator=exact))


def test_rewards_jumps_and_chains_show_theirs():
    objective = fl.Objective(running=drift, stop=lambda theta, x: x[0], overshoot="bridge")
    assert repr(objective) == "Objective(running=drift, stop=<lambda>, overshoot='bridge')"
    jumps = fl.Jumps(lambda theta, x: x, changes=[[1, 0], [0, 1], [-1, 0]], diffusion=PROCESS)
    assert repr(jumps) == f"Jumps(rates=<lambda>, changes=<3 × 2>, diffusion={PROCESS!r})"
    chain = fl.Chain(None, log_prob=lambda theta, x, x_next: 0.0)
    assert repr(chain) == "Chain(log_prob=<lambda>)"
    for record in (objective, jumps, chain):
        assert parse(record._repr_html_()) is not None
        assert "0x" not in repr(record)  # no addresses


# ------------------------------------------------------------------------------------- trajectories


def make_trajectories(count=4, **changes):
    t = np.linspace(0, 2, 201)
    x = np.stack([np.sin(t), 5 * np.cos(t)], axis=1)[None] * np.ones((count, 1, 1))
    return fl.Trajectories(t, x)._replace(**changes)


def test_trajectories_show_shape_times_and_ranges():
    trajectories = make_trajectories(group=np.array([0, 0, 1, 1]), context={"g": np.ones(4)})
    assert repr(trajectories) == (
        "4 trajectories × 201 times × 2 components   float64, 12.9 kB\n"
        "  t        0 … 2   steps of 0.01\n"
        "  context  g (4,)\n"
        "  group    2 devices\n"
        f"  x[0]     0 … {np.sin(1.57):.4g}\n"
        f"  x[1]     {5 * np.cos(2):.4g} … 5"
    )
    tree = parse(trajectories._repr_html_())
    curves = [line.attrib["points"].split() for line in tree.iter("polyline")]
    assert len(curves) == 2 * 4
    assert {len(points) for points in curves} == {html.MAX_POINTS}


def test_uneven_times_bad_numbers_and_many_components_are_stated():
    x = np.zeros((3, 4, 20))
    x[0, 0, 0] = np.nan
    x[0, 1, 1] = np.inf
    trajectories = fl.Trajectories(np.array([0.0, 0.1, 0.3, 0.4]), x)
    text = repr(trajectories)
    assert "steps of 0.1 … 0.2" in text
    assert "x[0]  0 … 0   1 not finite" in text
    assert "20 components in all; shown: the first 8" in text
    assert "nan" not in trajectories._repr_html_()
    single = jnp.linspace(0, 1000, 10_001, dtype=jnp.float32)  # differences scatter by rounding
    assert "steps of 0.1\n" in repr(fl.Trajectories(single, np.zeros((1, 10_001, 1))))
    assert "1 trajectory × 10,001 times × 1 component " in repr(
        fl.Trajectories(single, np.zeros((1, 10_001, 1)))
    )


class Counted:
    """States in a file, of which every number that is read is counted."""

    def __init__(self, data):
        self.data = data
        self.shape = data.shape
        self.dtype = data.dtype
        self.read = 0

    def __len__(self):
        return self.shape[0]

    def __getitem__(self, key):
        part = self.data[key]
        self.read += part.size
        return part


@pytest.mark.parametrize("shape", [(10**6, 100, 2), (3, 10**7, 1)])
def test_of_a_file_larger_than_memory_the_beginning_is_read(tmp_path, shape):
    with h5py.File(tmp_path / "large.h5", "w") as file:
        data = file.create_dataset("x", shape, "f4", chunks=(1, 100, shape[2]))  # nothing on disk
        x = Counted(data)
        trajectories = fl.Trajectories(np.arange(shape[1]), x)
        text = repr(trajectories)
        assert x.read * 4 <= records.MAX_BYTES
        assert "ranges of the first" in text
        assert f"{shape[0]:,} trajectories × {shape[1]:,} times" in text


def test_within_a_compiled_function_shapes_are_shown():
    shown = []

    @jax.jit
    def double(x):
        trajectories = fl.Trajectories(x[0, :, 0], x)
        shown.append(repr(trajectories))
        return 2 * trajectories.x

    double(jnp.ones((3, 4, 2), jnp.float32))
    assert shown == ["3 trajectories × 4 times × 2 components   float32, 96 B"]


def test_trees_of_trajectories_print_as_tuples():
    tree = jax.tree.map(np.shape, make_trajectories())
    assert (
        repr(tree) == "Trajectories(t=(201,), x=(4, 201, 2), context=None, events=None, group=None)"
    )
    assert tree._repr_html_() is None


# ------------------------------------------------------------------------------------------ curves


def test_a_curve_spans_its_box_and_a_band_has_both_sides():
    drawing = html.draw_curves([[0.0, 1.0, 3.0]], error=[0.0, 1.0, 0.0], width=102, height=34)
    tree = parse(drawing)
    (line,) = tree.iter("polyline")
    assert line.attrib["points"] == "1.0,32.0 51.0,22.0 101.0,2.0"
    (band,) = tree.iter("polygon")
    assert band.attrib["points"] == "1.0,32.0 51.0,12.0 101.0,2.0 101.0,2.0 51.0,32.0 1.0,32.0"
    assert html.draw_curves([[np.nan, np.nan]]) == ""
    assert html.draw_curves([]) == ""
    assert "16.0" not in html.draw_curves([[2.0, 2.0]])  # a constant is a line, not a division by 0


# --------------------------------------------------------------------------------- any other record


class Inner(NamedTuple):
    low: float
    high: float


@show_fields
@dataclasses.dataclass(frozen=True)
class Outer:
    names: tuple
    numbers: np.ndarray
    few: np.ndarray
    bounds: dict
    inner: Inner
    function: Callable
    texts: tuple
    nothing: None = None
    empty: dict = dataclasses.field(default_factory=dict)
    none: tuple = ()


RECORD = Outer(
    ("a", "b"),
    np.linspace(-1.0, 2.0, 12).reshape(3, 4),
    np.array([1.0, 0.25]),
    {"k": Inner(0.0, 2.5), "s": 3},
    Inner(0.0, np.inf),
    drift,
    ("the first note", "the second note"),
)


def test_any_record_is_shown_by_its_fields():
    assert repr(RECORD).splitlines() == [
        "Outer",
        "  names     a, b",
        "  numbers   (3, 4) float64, -1 … 2",
        "  few       [1, 0.25]",
        "  bounds    k (low 0, high 2.5), s 3",
        "  inner     low 0, high inf",
        "  function  drift",
        "  texts     the first note",
        "            the second note",
        "  none      none",
    ]
    cells = read_cells(RECORD._repr_html_())
    assert cells[0] == ["names", "a, b"]
    assert ["texts", "the first note\nthe second note"] in cells


def test_fields_that_are_long_are_wrapped_and_cut():
    many = {f"parameter_{k}": 1.0 for k in range(20)}
    lines = repr(dataclasses.replace(RECORD, bounds=many)).splitlines()
    assert max(map(len, lines)) <= 100
    assert "… 12 more" in " ".join(lines)


def test_a_record_within_a_compiled_function_has_shapes_alone():
    texts = []

    def f(x):
        texts.append(repr(fl.fisher.__globals__["Fisher"](x, 3, {"k": x[0, 0]})))
        return x

    jax.jit(f)(jnp.ones((4, 2)))
    assert "rows   (4, 2) float" in texts[0]


@pytest.mark.parametrize("kind", [InstrumentCheck, fl.Training, insitu.Plan, insitu.Model])
def test_public_records_are_shown_by_their_fields(kind):
    assert kind.__repr__ is describe_fields
