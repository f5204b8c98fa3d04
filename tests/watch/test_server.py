"""The server of the page, asked without a browser: limits, long numbers, ports."""

import asyncio
import json

import h5py
import numpy as np
import pytest
from typer.testing import CliRunner

from fluctua.cli.app import app as commands
from fluctua.watch import server
from fluctua.watch.folders import RunLibrary, UnreadableRun
from watched import Growing

pytest.importorskip("starlette", reason="the page needs fluctua[watch]")


async def ask(app, path, sent):
    """Ask an ASGI application for a path, in the place of a browser that stays. sent: is given
    its messages.
    """
    path, _, query = path.partition("?")
    scope = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.4"},
        "http_version": "1.1",
        "method": "GET",
        "path": path,
        "raw_path": path.encode(),
        "query_string": query.encode(),
        "headers": [(b"host", b"localhost")],
        "scheme": "http",
        "server": ("localhost", 80),
        "client": ("localhost", 1),
        "root_path": "",
    }

    async def send(message):
        await asyncio.sleep(0.01)  # as a socket does
        sent.append(message)

    async def receive():
        await asyncio.Event().wait()

    await app(scope, receive, send)


class Page:
    """The page of a run. get: (status, content)."""

    def __init__(self, run):
        self.app = server.make_application([run.place.path.parent])

    def get(self, path):
        sent = []
        asyncio.run(ask(self.app, path, sent))
        return sent[0]["status"], b"".join(message.get("body", b"") for message in sent[1:])

    @property
    def number(self):
        return json.loads(self.get("/runs")[1])[0]["number"]


@pytest.fixture
def run(tmp_path):
    run = Growing(tmp_path / "run")
    run.grow(6)
    return run


@pytest.fixture
def page(run):
    return Page(run)


@pytest.mark.parametrize("record", ["9" * 5000, "9" * 19, "-1", "1.5", "x", "٣"])
def test_a_record_that_is_none_is_not_found(page, record):
    number = page.number
    assert page.get(f"/runs/{number}/theta/{record}")[0] == 404
    assert page.get(f"/runs/{number}/theta/1")[0] == 200


@pytest.mark.parametrize("table", ["history", "signal", "incidents", "devices"])
@pytest.mark.parametrize("cell", ["9" * 30, "9" * 5000, "9" * 200_000, "1e400", "nan"])
def test_long_numbers_in_a_table_are_no_error_of_the_server(page, run, table, cell):
    path = run.place.path / f"{table}.csv"
    columns = {"history": 9, "signal": 6, "incidents": 4, "devices": 1}[table]
    header = path.read_text().splitlines()[0] if path.exists() else "row,1 J"
    path.write_text(f"{header}\n0{f',{cell}' * columns}\n")
    number = page.number
    for place in ("history", "parameters", "details", "devices", "history.csv"):
        assert page.get(f"/runs/{number}/{place}")[0] in (200, 404), place
    if table == "history":
        assert page.get(f"/runs/{number}/history")[0] == 404


def test_a_summary_that_nests_without_end_is_no_error_of_the_server(page, run):
    (run.place.path / "summary.json").write_text("[" * 60_000)
    assert page.get("/runs")[0] == 200


def declare(path, name, shape, chunks):
    """A data set without content: a few kilobytes whatever its shape."""
    with h5py.File(path, "a") as file:
        del file[name]
        file.create_dataset(name, shape, np.float64, chunks=chunks, compression="gzip")


@pytest.mark.parametrize(
    ("name", "shape", "chunks"),
    [
        ("omega", (3, 200_000_000), (1, 2**16)),
        ("iteration", (2_000_000_000,), (2**16,)),
        ("chi", (4, 1000), (100_000, 1000)),
        ("positions", (200_000_000, 2), (2**16, 2)),
    ],
)
def test_what_a_file_declares_is_not_read_blindly(run, name, shape, chunks):
    """Without the limit the first takes 5 GB."""
    if name == "chi":
        with h5py.File(run.place.parameters, "a") as file:
            del file[name]
            file.create_dataset(name, shape, np.float64, chunks=chunks, maxshape=(None, 1000))
    else:
        declare(run.place.parameters, name, shape, chunks)
    assert run.place.parameters.stat().st_size < 2**22
    library = RunLibrary([run.place.path.parent])
    number = library.overview()[0]["number"]
    with pytest.raises(UnreadableRun, match=f"{name}.*too large"):
        library.parameters(number)


def test_many_arrays_are_too_large_together(run, monkeypatch):
    monkeypatch.setattr("fluctua.watch.folders.MAX_NUMBERS", 20)  # omega 12, chi 12, kappa 17
    library = RunLibrary([run.place.path.parent])
    with pytest.raises(UnreadableRun, match="more than 20 parameters"):
        library.parameters(library.overview()[0]["number"])


def test_streams_at_once_are_limited(page):
    """All ask before the first is served; places come free again."""

    async def open_streams(many):
        answers = [[] for _ in range(many)]
        tasks = [asyncio.create_task(ask(page.app, "/changes", sent)) for sent in answers]
        async with asyncio.timeout(120):
            while not all(answers):
                await asyncio.sleep(0.01)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        return [sent[0]["status"] for sent in answers]

    async def ask_twice():
        return await open_streams(60), await open_streams(1)

    first, second = asyncio.run(ask_twice())
    assert first.count(200) == server.MAX_STREAMS
    assert first.count(503) == 60 - server.MAX_STREAMS
    assert second == [200]


@pytest.mark.parametrize("port", ["99999", "65536", "-1"])
def test_a_port_that_is_none_is_refused(tmp_path, port):
    answer = CliRunner().invoke(commands, ["watch", str(tmp_path), "--port", port])
    assert answer.exit_code == 2
    assert f"0 to 65535; got {port}" in answer.output
