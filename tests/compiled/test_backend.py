"""Kernels on disk are private and intact, and JAX does what they cannot."""

import logging
import os
import shlex
import shutil
import stat
from itertools import islice
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import scipy

import first_passage
import fluctua as fl
from cuda_device import has_gpu
from fluctua.compiled import backend, cpu, kernels, passes, whole_estimate
from fluctua.compiled.scalar import Unsupported
from fluctua.core import streamed
from fluctua.scale.distributed import distributed

T = jnp.linspace(0, 1, 5)
THETA = {"rate": jnp.array(0.7), "rest": jnp.array([0.2, -0.1])}
OBJECTIVE = fl.Objective(running=lambda theta, x: x[0] * x[1])
SOURCE = 'extern "C" int answer() { return 42; }'


def relaxing(theta, x):
    return -theta["rate"] * (x - theta["rest"])


PROCESS = fl.Process(relaxing, lambda theta, x: 0.3 * jnp.ones(2))


def estimator(process=PROCESS, *, baseline="none", **options):
    return fl.ppgt(fl.simulator(process, jnp.ones(2), T, **options), OBJECTIVE, baseline=baseline)


@pytest.fixture
def small(monkeypatch):
    """Any call is worth a kernel; reasons are told again."""
    monkeypatch.setattr(backend, "MIN_KERNEL_WORK", 1)
    monkeypatch.setattr(backend, "_logged", set())


def answer(path):
    return cpu.ctypes.CDLL(str(path)).answer()


def test_libraries_are_private_and_kept(kernels):
    library = cpu.find_or_build(SOURCE, "-O0")
    assert answer(library) == 42
    assert stat.S_IMODE(kernels.stat().st_mode) == 0o700
    assert not stat.S_IMODE(library.stat().st_mode) & 0o077
    built = library.stat().st_mtime_ns
    assert cpu.find_or_build(SOURCE, "-O0").stat().st_mtime_ns == built
    assert cpu.find_or_build(SOURCE + "\n", "-O0") != library


@pytest.mark.parametrize("harm", ["content", "hash", "mode"])
def test_a_library_that_was_changed_is_built_again(harm, kernels):
    source = SOURCE + f"// {harm}"
    library = cpu.find_or_build(source, "-O0")
    if harm == "content":
        library.write_bytes(library.read_bytes() + b"more")
    elif harm == "hash":
        library.with_suffix(".sha256").unlink()
    else:
        library.chmod(0o777)
    assert not cpu.is_intact(library)
    assert cpu.is_intact(cpu.find_or_build(source, "-O0"))
    assert answer(library) == 42


def test_a_folder_that_others_own_is_refused(monkeypatch, tmp_path):
    (tmp_path / "kernels").mkdir(mode=0o755)
    (tmp_path / "kernels" / f"fluctua-{os.getuid()}").symlink_to(tmp_path)
    monkeypatch.setenv("FLUCTUA_KERNELS", str(tmp_path / "kernels"))
    with pytest.raises(Unsupported, match="FLUCTUA_KERNELS"):
        cpu.find_or_build(SOURCE, "-O0")


@pytest.fixture
def forget_compilers():
    """The environment is searched for compilers anew, in the test and after it."""
    cpu.find_compiler.cache_clear()
    yield
    cpu.find_compiler.cache_clear()


@pytest.mark.skipif(has_gpu(), reason="there is a GPU, whose kernels need no C++ compiler")
def test_without_a_compiler_jax_does_the_work_and_one_line_says_so(
    small, forget_compilers, monkeypatch, caplog
):
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(backend.cuda, "is_available", lambda: False)
    kernels.make_kernel.cache_clear()
    expected = estimator(backend="jax").samples(jax.random.key(0), THETA, 8)
    with caplog.at_level(logging.WARNING, logger="fluctua"):
        for _ in range(2):
            found = estimator().samples(jax.random.key(0), THETA, 8)
    jax.tree.map(np.testing.assert_array_equal, found, expected)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "run on JAX" in caplog.text
    assert "no C++ compiler was found: install" in caplog.text
    with pytest.raises(ValueError, match="compiler"):
        estimator(backend="cpu").samples(jax.random.key(0), THETA, 8)


def test_a_compiler_that_is_not_there_is_named(forget_compilers, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(Unsupported, match="CXX=no-such-compiler"):
        cpu.find_or_build(SOURCE, "-O0")


def write_compiler(path, known):
    """A compiler that knows one processor flag, and leaves all else to the system's."""
    real = shlex.quote(cpu.find_compiler())
    path.write_text(
        "#!/bin/sh\n"
        "for flag; do shift; case $flag in\n"
        f"  {known}) ;;\n"
        "  -m*=native) exit 1 ;;\n"
        '  *) set -- "$@" "$flag" ;;\n'
        "esac; done\n"
        f'exec {real} "$@"\n'
    )
    path.chmod(0o700)
    return str(path)


@pytest.mark.parametrize("known", ["-march=native", "-mcpu=native", "none"])
def test_a_processor_flag_is_passed_only_if_the_compiler_knows_it(
    known, forget_compilers, monkeypatch, tmp_path
):
    program = write_compiler(tmp_path / "c++", known)
    flags = [flag for flag in cpu.choose_options(program) if flag.endswith("=native")]
    assert flags == ([known] if known != "none" else [])
    monkeypatch.setenv("CXX", program)
    cpu.find_compiler.cache_clear()
    assert answer(cpu.find_or_build(SOURCE + f"// {known}", "-O0")) == 42


@pytest.mark.skipif(shutil.which("clang++") is None, reason="needs clang++")
@pytest.mark.parametrize("baseline", ["none", "time"])
def test_clang_builds_the_same_kernels(baseline, forget_compilers, monkeypatch):
    monkeypatch.setenv("CXX", "clang++")
    kernels.make_kernel.cache_clear()
    expected = estimator(baseline=baseline, backend="jax").samples(jax.random.key(0), THETA, 40)
    found = estimator(baseline=baseline, backend="cpu").samples(jax.random.key(0), THETA, 40)
    assert Path(cpu.find_compiler()).name == "clang++"
    kernels.make_kernel.cache_clear()
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-9), found, expected)


@pytest.mark.long
def test_what_kernels_do_not_do_is_done_by_jax(small, caplog):
    sorting = fl.Process(lambda theta, x: relaxing(theta, jnp.sort(x)), PROCESS.noise)
    estimator(sorting).samples(jax.random.key(0), THETA, 8)
    assert "`sort`" in caplog.text
    estimator(baseline=fl.baselines.binned(lambda theta, x: x[0], bins=2)).samples(
        jax.random.key(0), THETA, 8
    )
    assert "'binned'" in caplog.text


def test_small_calls_stay_on_jax(monkeypatch):
    monkeypatch.setattr(passes, "run_sweep", lambda *call: pytest.fail("a kernel was asked for"))
    estimator().samples(jax.random.key(0), THETA, 8)
    estimator()(jax.random.key(0), THETA, 8)


@pytest.mark.parametrize("count", [1, 2, 40])
@pytest.mark.parametrize("baseline", ["none", "time"])
def test_an_estimate_is_that_of_single_gradients(baseline, count):
    subject = estimator(baseline=baseline, backend="cpu")
    key = jax.random.key(2)
    got = subject(key, THETA, count)
    expected = fl.reduce_samples(subject.samples(key, THETA, count))
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert isinstance(one, jax.Array | int)
        assert np.asarray(one).dtype == np.asarray(other).dtype
        np.testing.assert_allclose(one, other, rtol=1e-7, atol=1e-7)


def test_an_estimate_counts_the_trajectories_that_stop():
    process, objective, start, t, theta, context = first_passage.moving_interval("bridge")
    simulator = fl.simulator(process, start, t, context=context, backend="cpu")
    subject = fl.ppgt(simulator, objective, baseline="mean")
    key = jax.random.key(2)
    got = subject(key, theta, 40)
    expected = fl.reduce_samples(subject.samples(key, theta, 40))
    assert 0 < got.stopped < 1
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("shape", [(5, 3), (1, 2), (40_000, 2)])  # of two blocks, the last
def test_moments_by_numpy(shape):
    values = np.random.default_rng(0).gamma(2.0, size=shape)
    mean, deviation, skewness, kurtosis, square = whole_estimate.take_moments(values)
    np.testing.assert_allclose(mean, values.mean(axis=0))
    np.testing.assert_allclose(square, (values**2).mean(axis=0))
    if len(values) == 1:
        assert np.isnan(deviation).all()
        assert (skewness == 0).all()
        return
    np.testing.assert_allclose(deviation, values.std(axis=0, ddof=1))
    np.testing.assert_allclose(skewness, scipy.stats.skew(values))
    np.testing.assert_allclose(kurtosis, scipy.stats.kurtosis(values))


def test_a_kernel_that_is_not_made_is_tried_once(monkeypatch, small):
    tried = []

    def decline(*call):
        tried.append(call)
        raise Unsupported("test", "this kernel only counts")

    monkeypatch.setattr(passes, "run_sweep", decline)
    key = jax.random.key(0)
    got = estimator()(key, THETA, 8)
    assert len(tried) == 1
    expected = estimator(backend="jax")(key, THETA, 8)
    jax.tree.map(np.testing.assert_array_equal, got, expected)
    with pytest.raises(ValueError, match="only counts"):
        estimator(backend="cpu")(key, THETA, 8)


def test_generated_source_has_the_names_of_the_parameters():
    source = estimator().source(THETA)
    for name in ("rate", "rest[0]", "rest[1]"):
        assert f"score of {name}" in source
    assert (
        "0.7" not in source.split("// The same for all")[1].split("#include")[0]
    )  # numbers of θ are arguments
    with pytest.raises(ValueError, match="backend"):
        estimator(backend="jax").source(THETA)


def test_a_step_of_jumps_counts_for_several(monkeypatch):
    monkeypatch.setattr(
        backend, "MIN_KERNEL_WORK", 100 * 4 * backend.JUMP_STEP_WORK
    )  # T has 4 steps
    jumps = fl.Jumps(lambda theta, x: x, np.eye(2))
    left = lambda process, count: backend.Compiled("auto").is_too_small(
        SimpleNamespace(count=count, substrate=fl.simulator(process, jnp.ones(2), T))
    )
    assert [left(jumps, 99), left(jumps, 100), left(PROCESS, 100)] == [True, False, True]


@pytest.mark.skipif(has_gpu(), reason="there is a GPU, whose kernels take longer to compile")
def test_few_numbers_compile_sooner(monkeypatch):
    monkeypatch.setattr(backend.cuda, "is_available", lambda: False)
    monkeypatch.setattr(backend, "MIN_KERNEL_WORK", 4 * 100 * backend.QUICK_SHARE)
    start = jnp.ones(2)

    def left_to_jax(process, theta, count):
        substrate = fl.simulator(process, start, T)
        call = streamed.Call(None, (), None, substrate, None, theta, count)
        return backend.Compiled("auto").is_too_small(call)

    many = {"rate": jnp.ones(backend.QUICK_NUMBERS)}
    jumps = fl.Jumps(lambda theta, x: x, np.eye(2))
    assert [left_to_jax(PROCESS, THETA, 99), left_to_jax(PROCESS, THETA, 100)] == [True, False]
    assert left_to_jax(PROCESS, many, 100)
    assert left_to_jax(jumps, THETA, 100)


@pytest.fixture
def kernel_calls(monkeypatch):
    """Keys of the calls that "auto" gives to a kernel; JAX does them all the same.

    Ten calls of 8 × 4 steps pay.
    """
    monkeypatch.setattr(backend, "MIN_KERNEL_WORK", 10 * 8 * 4)
    monkeypatch.setattr(backend, "QUICK_SHARE", 1)
    monkeypatch.setattr(backend, "_logged", set())
    calls = []

    def decline(call, place):
        calls.append(jax.random.key_data(call.key).tolist())
        raise Unsupported("test", "this kernel only counts")

    monkeypatch.setattr(passes, "run_sweep", decline)
    return calls


def ascend(subject, most=12, **options):
    training = fl.Training(subject, THETA, optax.sgd(1e-3), trajectories=8)
    return list(islice(fl.train(training, **options), most))


@pytest.mark.parametrize("shards", [0, 1])
def test_auto_weighs_all_iterations_of_a_training(kernel_calls, shards):
    subject = estimator()
    if shards:
        subject = distributed(subject, None, shards=shards)
    ascend(subject, iterations=9)
    assert not kernel_calls
    ascend(subject, iterations=10)
    assert len(kernel_calls) == 10


def test_auto_decides_alike_wherever_a_training_was_interrupted(kernel_calls):
    whole = ascend(estimator(), iterations=10)
    at_once = list(kernel_calls)
    kernel_calls.clear()
    first = ascend(estimator(), most=4, iterations=10)
    rest = ascend(estimator(), iterations=10, start_from=first[-1])
    assert kernel_calls == at_once
    assert [float(r.estimate.value) for r in first + rest] == [
        float(r.estimate.value) for r in whole
    ]


def test_auto_counts_the_iterations_so_far_where_no_number_is_planned(kernel_calls):
    ascend(estimator())
    assert len(kernel_calls) == 3  # the tenth, eleventh and twelfth
    estimator()(jax.random.key(0), THETA, 8)  # one call alone is one call
    assert len(kernel_calls) == 3


def test_an_unknown_backend_is_refused():
    with pytest.raises(ValueError, match="gpu"):
        fl.simulator(PROCESS, jnp.ones(2), T, backend="gpu")


def test_a_range_of_trajectories_is_that_of_the_whole():
    whole = estimator(backend="cpu").samples(jax.random.key(0), THETA, 24)
    part = estimator(backend="cpu").samples(jax.random.key(0), THETA, 8, first=16)
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a[16:], b), whole, part)


NEGATIVE = fl.Jumps(
    lambda theta, x: jnp.array([9.0, theta["rate"] * (1.5 - x[0])]), [[1.0, 0.0], [-1.0, 0.0]]
)


@pytest.mark.parametrize(
    ("process", "rate"), [(PROCESS, 1e200), (NEGATIVE, 0.7)], ids=["overflow", "negative rate"]
)
def test_states_that_are_not_finite_are_named_as_on_jax(process, rate):
    theta = {**THETA, "rate": jnp.array(rate)}
    messages = []
    for choice in ("jax", "cpu"):
        with pytest.raises(FloatingPointError) as caught:
            estimator(process, backend=choice).samples(jax.random.key(0), theta, 24)
        messages.append(str(caught.value))
    assert messages[0] == messages[1]
