"""Files of usual instruments: without times, in counts, as arrays and tables; and their
conversion.
"""

import h5py
import numpy as np
import pytest
from typer.testing import CliRunner

from fluctua import insitu
from fluctua.cli.app import app

X = np.random.default_rng(0).normal(size=(6, 40, 3)).cumsum(axis=1)
T = 0.25 * np.arange(40)


def run(*arguments):
    return CliRunner().invoke(app, [str(a) for a in arguments])


def open_file(path, **options):
    with insitu.files.open(path, **options) as r:
        return r.description, np.array(r.x[:])


def test_times_from_an_interval(tmp_path):
    np.savez(tmp_path / "a.npz", x=X)
    np.save(tmp_path / "a.npy", X)
    for name in ("a.npz", "a.npy"):
        with pytest.raises(ValueError, match="--set dt="):
            insitu.files.open(tmp_path / name)
        description, x = open_file(tmp_path / name, dt=0.25)
        np.testing.assert_array_equal(description.t, T)
        np.testing.assert_array_equal(x, X)
    done = run("inspect", tmp_path / "a.npy", "--set", "dt=0.25")
    assert done.exit_code == 0, done.output
    assert "a sample every 0.25" in done.output
    np.savez(tmp_path / "b.npz", x=X, t=T)
    with pytest.raises(ValueError, match="has times of its own"):
        insitu.files.open(tmp_path / "b.npz", dt=0.25)


@pytest.mark.parametrize(
    ("x", "whole", "what"),
    [
        (X[0], X[:1], "one trajectory"),
        (X[:, :, 1], X[:, :, 1:2], "one channel"),
        (X[2, :, 1], X[2:3, :, 1:2], "one trajectory"),
    ],
)
def test_the_number_of_times_shows_which_axis_is_missing(tmp_path, x, whole, what):
    np.savez(tmp_path / "a.npz", x=x, t=T)
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["x"] = x
        file["t"] = T
    for name in ("a.npz", "a.h5"):
        with insitu.files.open(tmp_path / name, {"x": "x"}) as r:
            assert r.kind.endswith(f"`x` {x.shape} taken as {what}")
            np.testing.assert_array_equal(r.x[:], whole)
            np.testing.assert_array_equal(r.x[0], whole[0])
            np.testing.assert_array_equal(r.x[:1, 3:5], whole[:1, 3:5])
            np.testing.assert_array_equal(r.x[-1, 3], whole[-1, 3])
    done = run("inspect", tmp_path / "a.npz")
    assert f"`x` {x.shape} taken as {what}" in done.output


def test_where_it_does_not_the_line_to_type_is_shown(tmp_path):
    np.save(tmp_path / "a.npy", X[0])
    done = run("inspect", tmp_path / "a.npy", "--set", "dt=0.25")
    assert done.exit_code == 2
    line = f"fluctua convert {tmp_path / 'a.npy'} OUT.nc --set dt=0.25 --set axes="
    assert f"40 times and 3 channels: {line}time,channel." in done.output
    assert f"40 trajectories of 3 times and one channel: {line}trajectory,time." in done.output
    np.savez(tmp_path / "b.npz", x=X[0, :3], t=T[:3])
    with pytest.raises(ValueError, match=r"got \(3, 3\)\. For one trajectory"):
        insitu.files.open(tmp_path / "b.npz")
    np.savez(tmp_path / "c.npz", x=X[0], t=T[:7])
    with pytest.raises(ValueError, match=r"\(trajectories, 7, channels\) .* got \(40, 3\)"):
        insitu.files.open(tmp_path / "c.npz")
    with pytest.raises(ValueError, match=r"`axes` must be time,channel or .*; got 'x'"):
        insitu.files.open(tmp_path / "a.npy", dt=0.25, axes="x")
    np.save(tmp_path / "d.npy", X[0, :, 0])
    with pytest.raises(ValueError, match=r"two axes; got \(40,\)"):
        insitu.files.open(tmp_path / "d.npy", dt=0.25, axes="time,channel")


def test_convert_sets_axes_names_and_units(tmp_path):
    np.save(tmp_path / "a.npy", X[0])
    settings = ["dt=0.25", "axes=time,channel", "channels=x,y,angle", "units=V", "time_units=ms"]
    options = [word for setting in settings for word in ("--set", setting)]
    done = run("convert", tmp_path / "a.npy", tmp_path / "a.nc", *options)
    assert done.exit_code == 0, done.output
    assert "1 trajectory of" in done.output
    head, x = open_file(tmp_path / "a.nc")
    assert (head.channels, head.units, head.time_units) == (("x", "y", "angle"), "V", "ms")
    np.testing.assert_array_equal(x, X[:1])
    done = run("convert", tmp_path / "a.nc", tmp_path / "b.nc", "--set", "channels=x,y")
    assert done.exit_code == 2
    assert "must name 3 channels" in done.output
    assert "got 2: x, y" in done.output
    assert not (tmp_path / "b.nc").exists()


def test_counts_get_their_units(tmp_path):
    counts = np.clip(X * 1000, -32768, 32767).astype(np.int16)
    np.savez(tmp_path / "a.npz", x=counts, t=T)
    with pytest.raises(ValueError, match=r"counts \(int16\).*--set scale="):
        insitu.files.open(tmp_path / "a.npz")
    description, x = open_file(tmp_path / "a.npz", scale=0.001)
    assert description.dtype == "float32"
    np.testing.assert_allclose(x, X, atol=0.0011)
    _, each = open_file(tmp_path / "a.npz", scale=[0.001, 0.002, 0.003])
    np.testing.assert_allclose(each, x * [1, 2, 3], rtol=1e-6)
    with pytest.raises(ValueError, match="each of 3 channels"):
        insitu.files.open(tmp_path / "a.npz", scale=[1.0, 2.0])
    assert run("inspect", tmp_path / "a.npz", "--set", "scale=1e-3").exit_code == 0
    assert "got 'x'" in run("inspect", tmp_path / "a.npz", "--set", "scale=x").output


def test_clipping_is_found_in_counts(tmp_path):
    """A single sample at the end of the counter's range is clipped; no pile is needed to see
    that.
    """
    counts = (X * 1000).astype(np.int16)
    counts[2, 7, 1] = 32767
    np.savez(tmp_path / "a.npz", x=counts, t=T)
    done = run("inspect", tmp_path / "a.npz", "--set", "scale=0.001")
    assert done.exit_code == 1
    assert (
        "clipped above: x[1]; worst is x[1], 1 sample at the end of the counter's range"
        in done.output
    )


@pytest.mark.parametrize("kind", ["numbered", "restarting", "tabs", "bare"])
def test_tables_of_numbers(tmp_path, kind):
    path, t = tmp_path / "a.csv", np.tile(T, 6)
    flat, number = X.reshape(-1, 3), np.repeat(np.arange(6), 40)
    columns, names, options = [number, t, *flat.T], "run,time,left,right,top", {}
    if kind == "restarting":
        columns, names = columns[1:], "time,left,right,top"
    if kind == "bare":
        columns, names, options = list(X[0].T), "", {"dt": 0.25}
    tab = "\t" if kind == "tabs" else ","
    np.savetxt(
        path,
        np.column_stack(columns),
        delimiter=tab,
        header=names.replace(",", tab),
        comments="",
        fmt="%.17g",
    )
    if kind == "bare":
        path.write_text(path.read_text().lstrip("\n"))
    description, x = open_file(path, **options)
    assert description.channels == (("left", "right", "top") if names else ("x[0]", "x[1]", "x[2]"))
    np.testing.assert_array_equal(x, X[:1] if kind == "bare" else X)
    np.testing.assert_allclose(description.t, T)


def test_what_is_wrong_with_a_table(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("left,right\n1,2\n3,4\n")
    with pytest.raises(
        ValueError, match="no column of times; it has left, right.*--set dt=.*--map t=COLUMN"
    ):
        insitu.files.open(path)
    with pytest.raises(ValueError, match="got t=clock, and it has left, right"):
        insitu.files.open(path, {"t": "clock"})
    path.write_text("run,time,left\n0,0,1\n0,1,2\n0,2,3\n1,0,1\n")
    with pytest.raises(ValueError, match="trajectory 1 has 1 rows and the first 3"):
        insitu.files.open(path)
    path.write_text("time,left\n0,1\n1,high\n")
    with pytest.raises(ValueError, match="high"):
        insitu.files.open(path)


def test_a_cut_npz_is_named(tmp_path):
    np.savez(tmp_path / "a.npz", x=X, t=T)
    whole = (tmp_path / "a.npz").read_bytes()
    for share in (0.1, 0.5, 0.99):
        (tmp_path / "a.npz").write_bytes(whole[: int(share * len(whole))])
        with pytest.raises(ValueError, match="truncated"):
            insitu.files.open(tmp_path / "a.npz")


# --------------------------------------------------------------------------------------- conversion


def test_convert_and_drop(tmp_path):
    x = (X + 1j * X[::-1]).astype(np.complex64)
    x[2, 5, 1] = np.nan
    np.savez(tmp_path / "a.npz", psi=x, **{"context.phase": np.arange(6.0)})
    np.savez(tmp_path / "theta.npz", k=0.5)
    command = [
        "convert",
        tmp_path / "a.npz",
        tmp_path / "r.nc",
        "--map",
        "x=psi",
        "--set",
        "dt=0.25",
    ]
    refused = run(*command)
    assert refused.exit_code == 2
    assert "trajectory 2 of" in refused.output
    assert not (tmp_path / "r.nc").exists()
    done = run(*command, "--drop", "--params", tmp_path / "theta.npz")
    assert done.exit_code == 0, done.output
    assert "5 trajectories of" in done.output
    assert "dropped, not finite: 1 trajectory (2)" in done.output
    with insitu.files.open(tmp_path / "r.nc") as r:
        assert (r.kind, r.description.dtype, r.count) == ("recording", "complex64", 5)
        kept = x[[0, 1, 3, 4, 5]]
        np.testing.assert_array_equal(r.x[:], np.concatenate([kept.real, kept.imag], -1))
        assert r.context["phase"].tolist() == [0, 1, 3, 4, 5]
        assert float(r.description.parameters["k"]) == 0.5
        assert "a.npz (npz)" in r.description.provenance


def test_convert_saves_what_is_whole(tmp_path):
    """A flipped bit in the states of trajectory 3: the other five are copied, and that one is
    named.
    """
    path = tmp_path / "r.nc"
    insitu.files.save(path, insitu.files.Description(T, ("a", "b", "c")), X)
    data = bytearray(path.read_bytes())
    data[data.find(X[3, 10].tobytes())] ^= 1
    path.write_bytes(data)
    done = run("convert", path, tmp_path / "copy.nc")
    assert done.exit_code == 0, done.output
    assert "lost, damaged: 1 trajectory (3)" in done.output
    np.testing.assert_array_equal(open_file(tmp_path / "copy.nc")[1], X[[0, 1, 2, 4, 5]])


def test_two_identical_channels_are_noticed(tmp_path):
    x = X.copy()
    x[:, :, 2] = x[:, :, 0]
    np.savez(tmp_path / "a.npz", x=x, t=T)
    done = run("inspect", tmp_path / "a.npz")
    assert done.exit_code == 1
    assert "x[0] and x[2] are the same numbers" in done.output


def test_one_trajectory_is_one(tmp_path):
    np.savez(tmp_path / "a.npz", x=X[:1], t=T)
    done = run("inspect", tmp_path / "a.npz")
    assert "1 trajectory × 40 times" in done.output
    assert "1 trajectories" not in done.output
