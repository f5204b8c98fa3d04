"""The page in a browser: it follows a run that grows, is killed and goes on, and fetches
nothing from elsewhere.
"""

import csv
import io
import json
import shutil
import socket
import subprocess
import sys
import threading

import matplotlib.image
import numpy as np
import pytest

from fluctua.watch.server import make_application
from processes import environment_of_a_user, read_until, wait_until
from watched import Growing

pytestmark = pytest.mark.long

pytest.importorskip("starlette", reason="the page needs fluctua[watch]")
CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)


@pytest.fixture
def runs(tmp_path):
    folder = tmp_path / "runs"
    folder.mkdir()
    return folder


@pytest.fixture
def address(runs):
    """The page of `runs`, served by a thread of this process."""
    uvicorn = pytest.importorskip("uvicorn", reason="the page needs fluctua[watch]")
    with socket.create_server(("127.0.0.1", 0)) as listening:
        config = uvicorn.Config(
            make_application([runs]), log_level="warning", timeout_graceful_shutdown=1
        )
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
        thread.start()
        yield f"http://127.0.0.1:{listening.getsockname()[1]}/"
        server.should_exit = True
        thread.join()


@pytest.fixture
def address_of_command(runs):
    command = [sys.executable, "-m", "fluctua", "watch", str(runs)]
    environment = environment_of_a_user(PYTHONUNBUFFERED="1")
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as server:
        try:
            yield read_until(server, "Ctrl-C").split()[0]
        finally:
            server.terminate()


@pytest.fixture(scope="module")
def browser():
    if CHROMIUM is None:
        pytest.skip("no Chromium on this machine: apt-get install chromium")
    playwright = pytest.importorskip(
        "playwright.sync_api", reason="the browser is driven by playwright"
    )
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def page(browser, address):
    page = browser.new_page(viewport={"width": 1300, "height": 1400})  # in a profile of its own
    page.set_default_timeout(120_000)  # of milliseconds: the other cores may be busy
    page.errors, page.asked = [], []
    page.on("pageerror", lambda error: page.errors.append(str(error)))
    page.on("request", lambda request: page.asked.append(request.url))
    page.goto(address)
    yield page
    assert not page.errors
    assert all(url.startswith((address, "data:", f"blob:{address}")) for url in page.asked)
    page.close()


def until(page, expression, argument=None):
    """Wait for an expression to become true.

    The page's own policy forbids what `wait_for_function` does.
    """
    wait_until(
        lambda: page.evaluate(expression, argument) or page.wait_for_timeout(50), interval=0.0
    )


def points(page, number):
    """Wait until the curve of J has so many points."""
    label = "document.getElementById('chart-J').getAttribute('aria-label')"
    until(page, f"n => ({label} || '').includes(`: ${{n}} points`)", number)


def test_a_run_grows_is_killed_and_goes_on(runs, page):
    page.get_by_text("no run yet").wait_for()
    run = Growing(runs / "first")
    run.begin()
    run.grow(10)
    page.get_by_text("iteration 10").wait_for()
    page.get_by_text("running", exact=True).wait_for()
    points(page, 10)
    run.grow(10)
    points(page, 20)
    run.kill()
    page.get_by_text("killed", exact=True).wait_for()
    run.begin()
    run.cut(15)
    points(page, 15)
    run.grow(10, "escalate 2000; rewind 12")
    points(page, 25)
    page.get_by_role("cell", name="escalate 2000; rewind 12").wait_for()
    run.incident("dropped", "the line went dead")
    page.get_by_role("cell", name="the line went dead").wait_for()
    run.end()
    page.get_by_text("ended", exact=True).wait_for()


def test_the_slider_moves_the_network(runs, page):
    run = Growing(runs / "first")
    run.grow(41)
    slider = page.locator("#record")
    slider.wait_for()
    until(page, "document.getElementById('at').textContent === '40'")
    radius = lambda: float(page.locator("#network circle").first.get_attribute("r"))
    title = lambda: page.locator("#network circle title").first.text_content()
    largest = radius()
    slider.focus()
    page.keyboard.press("Home")  # by keyboard alone
    until(page, "document.getElementById('at').textContent === '0'")
    until(
        page,
        "r => Number(document.querySelector('#network circle').getAttribute('r')) < r",
        largest,
    )
    assert "ω = 0.00" in title()
    page.get_by_label("change since the start").check()
    page.keyboard.press("Tab")
    slider.focus()
    page.keyboard.press("End")
    until(
        page, "document.querySelector('#network circle title').textContent.includes('Δω = 0.400')"
    )


def test_runs_over_each_other_axes_and_downloads(runs, page):
    for name in ("first", "second"):
        Growing(runs / name).grow(12)
    page.get_by_label("curves of second").check()
    until(
        page,
        "document.getElementById('chart-J').getAttribute('aria-label').includes('; second: 12')",
    )
    page.get_by_label("log x").check()
    page.get_by_label("log J").check()
    page.get_by_label("against").select_option("trajectories")
    points(page, 12)
    page.get_by_role("button", name="Dark").click()
    assert page.evaluate("document.documentElement.dataset.theme") == "dark"
    with page.expect_download() as data:
        page.get_by_role("link", name="history of").click()
    assert data.value.path().read_text().startswith("row,iteration,J,")
    page.get_by_label("against").select_option("iteration")
    name, table = save_table(page, "J")
    assert name == "first-J.csv"
    each = [
        f"{run}: {what}" for run in ("first", "second") for what in ("J", "standard error of J")
    ]
    assert table[0] == ["iteration", *each]
    assert len(table) == 1 + 12
    assert [float(v) for v in table[2]] == [1, 0.3, 0.01, 0.3, 0.01]


# ----------------------------------------------------------------------------------------- exports


def save(page, what, kind):
    """Click a button beside a caption. Returns: name and content of the file."""
    page.wait_for_timeout(150)  # Chromium drops all but ten downloads per second
    with page.expect_download() as file:
        page.get_by_role("button", name=f"{what} as {kind}", exact=True).click()
    return file.value.suggested_filename, file.value.path().read_bytes()


def save_table(page, what):
    name, content = save(page, what, "CSV")
    return name, list(csv.reader(content.decode().splitlines()))


def save_picture(page, what):
    """Returns: the colours of a picture (height, width, 3), 0 to 255."""
    _, content = save(page, what, "PNG")
    return np.round(255 * matplotlib.image.imread(io.BytesIO(content), format="png")[..., :3])


def count_pixels(picture, colour):
    """Pixels of nearly this colour, (red, green, blue)."""
    return int(np.all(np.abs(picture - np.array(colour)) <= 3, axis=-1).sum())


def show(page, run):
    page.get_by_role("button", name=run, exact=True).click()


WIDTHS = """id => {  // how much wider a plot is than its place
    const host = document.getElementById(id);
    return host.firstChild.clientWidth - host.clientWidth;
}"""
COUNT_BLUE = """id => {  // pixels of a plot on the page that are blue
    const canvas = document.querySelector(`#${id} canvas`);
    if (!canvas?.width || !canvas.height) return 0;  // not laid out yet
    const v = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
    let count = 0;
    for (let k = 0; k < v.length; k += 4) count += v[k + 3] > 0 && v[k + 2] > v[k] + 60;
    return count;
}"""


BLUE = (0, 114, 178)
ORANGE = (213, 94, 0)
RED = (179, 38, 30)


def test_every_plot_is_saved_as_picture_and_table(runs, page):
    run = Growing(runs / "first")
    run.grow(12)
    run.expect()
    run.measure()
    page.get_by_role("heading", name="Instruments of first").wait_for()
    page.locator("#network circle").first.wait_for()
    for id in ("chart-J", "chart-guard", "chart-predicted", "chart-record"):
        until(page, f"id => ({COUNT_BLUE})(id) > 20", id)
    for id in ("chart-guard", "chart-chi2"):  # beside others that appear later
        until(page, f"id => ({WIDTHS})(id) === 0", id)
    page.get_by_role("button", name="Dark").click()  # files are white in any case
    buttons = page.locator(".exports button:visible")
    # five curves, network, three predictions, three of instruments
    wait_until(lambda: buttons.count() == 2 * 11, interval=0.05)
    names = [buttons.nth(k).get_attribute("aria-label") for k in range(buttons.count())]
    for name in names:
        what, kind = name.rsplit(" as ", 1)
        if kind == "CSV":
            _, table = save_table(page, what)
            assert len(table) > 10, what
            assert all(table[0]), what
            assert {len(row) for row in table} == {len(table[0])}, what
        else:
            picture = save_picture(page, what)
            assert picture.shape[1] == 1800, what
            assert np.all(picture[:4] == 255), what
            assert count_pixels(picture, (22, 25, 29)) > 100, what  # title and labels


def test_a_picture_shows_the_curves(runs, page):
    for name in ("first", "second"):
        Growing(runs / name).grow(12)
    points(page, 12)
    one = save_picture(page, "J")
    page.get_by_label("curves of second").check()
    until(page, "document.querySelector('#chart-J').getAttribute('aria-label').includes('second')")
    two = save_picture(page, "J")
    assert count_pixels(one, BLUE) > 1000
    assert count_pixels(one, ORANGE) == 0
    assert count_pixels(two, ORANGE) > 1000


# ---------------------------------------------------------------------------------------- profiles


def make_protocol(runs, name="trap", shape=(50,)):
    """A run whose protocol is that of its iteration throughout, and with one more parameter."""
    run = Growing(runs / name, every=1)
    values = {"theta/protocol": lambda k: np.full(shape, 0.1 * k), "theta/k": lambda k: 1.0}
    run.use(
        values,
        low={"theta/protocol": np.full(shape, -0.5)},
        high={"theta/protocol": np.full(shape, 1.5)},
        t=np.linspace(0, 5, 51),
    )
    run.grow(11)
    return run


def test_knots_of_a_protocol_are_a_profile_with_the_slider(runs, page):
    make_protocol(runs)
    page.get_by_text("protocol at iteration 10").wait_for()
    chart = page.locator("#chart-profile-0")
    label = chart.get_attribute("aria-label")
    assert label.split("; ") == [
        "protocol: 50 points, from 1.000 to 1.000",
        "protocol at the start: 50 points, from 0.000 to 0.000",
        "lower bound: 50 points, from -0.5000 to -0.5000",
        "upper bound: 50 points, from 1.500 to 1.500",
    ]
    assert page.locator("#profiles .u-legend tr.u-series").count() == 4
    assert page.locator("#chart-courses").get_attribute("aria-label").startswith("k: 11 points")
    page.locator("#record").focus()
    page.keyboard.press("Home")
    page.keyboard.press("ArrowRight")
    page.get_by_text("protocol at iteration 1", exact=True).wait_for()
    name, table = save_table(page, "protocol")
    assert name == "trap-protocol-1.csv"
    assert table[0] == ["time", "protocol", "protocol at the start", "lower bound", "upper bound"]
    np.testing.assert_allclose(
        np.array(table[1:], float)[:, 0], np.linspace(0, 5, 51)[:50], rtol=1e-6
    )
    np.testing.assert_allclose(np.array(table[1:], float)[:, 1:], [[0.1, 0, -0.5, 1.5]] * 50)
    page.get_by_label("change since the start").check()
    page.get_by_text("protocol at iteration 1: change since the start").wait_for()
    page.locator("#record").focus()
    page.keyboard.press("End")
    until(
        page,
        "document.querySelector('#chart-profile-0').getAttribute('aria-label') === "
        "'protocol: 50 points, from 1.000 to 1.000'",
    )


def test_rows_of_an_array_are_profiles_or_an_image(runs, page):
    make_protocol(runs, "few", (3, 20))
    make_protocol(runs, "many", (12, 20))
    show(page, "few")
    page.get_by_text("protocol at iteration 10").wait_for()
    label = page.locator("#chart-profile-0").get_attribute("aria-label")
    assert label.startswith("protocol[0, :]: 20 points")
    assert "protocol[2, :] at the start" in label
    show(page, "many")
    page.get_by_text("Colours from 1.00 (violet) to 1.00 (yellow)").wait_for()
    size = "(c => [c.width, c.height])(document.querySelector('#profiles canvas'))"
    assert page.evaluate(size) == [20, 12]
    _, table = save_table(page, "protocol")
    assert table[0][:2] == ["knot", "protocol[0, :]"]
    assert np.shape(table) == (21, 13)
    assert save_picture(page, "protocol").shape[1] == 1800


# ----------------------------------------------------------------------------- predictions, doubts


def test_predictions_stand_beside_measurements(runs, page):
    run = Growing(runs / "first")
    run.grow(12)
    run.expect()
    page.get_by_role("heading", name="Predictions of the calibrated model").wait_for()
    until(page, "!document.getElementById('record-view').hidden")
    label = lambda id: page.locator(id).get_attribute("aria-label")
    assert [part.split(",")[0] for part in label("#chart-predicted").split("; ")] == [
        "model",
        "expected before the measurement: 6 points",
        "measured: 6 points",
    ]
    assert "model, nothing measured: 6 points" in label("#chart-predicted")
    # off by 0.01, with errors of 0.02 and 0.01
    page.get_by_text("3 of 3 are within two standard errors").wait_for()
    assert "records: 6 points, from 1.100" in label("#chart-chi2")
    assert "6 points" in label("#chart-ensemble")  # without those of the model alone
    page.get_by_text("Trajectories per measured iteration").wait_for()
    page.get_by_text("98 % of the 50 samples").wait_for()
    page.get_by_label("component of the record").select_option("Im psi[0]")
    page.get_by_text("100 % of the 50 samples").wait_for()
    _, table = save_table(page, "Record")
    assert table[0] == [
        "time",
        "measured: Im psi[0]",
        "expected before the measurement: Im psi[0]",
        "expected before the measurement: two standard deviations of Im psi[0]",
    ]
    np.testing.assert_allclose([float(v) for v in table[1]], [0.0, 1.01, 1.0, 0.2], rtol=1e-5)
    _, table = save_table(page, "Predictions")
    assert table[0][0] == "iteration"
    assert table[1][1] == ""  # measured in the first iteration
    np.testing.assert_allclose([float(v) for v in table[1][2:]], [0.11, 0.02, 0.1, 0.01])
    assert table[2][2:] == [""] * 4  # and not in the second
    picture = save_picture(page, "Predictions")
    assert min(count_pixels(picture, BLUE), count_pixels(picture, ORANGE)) > 300


def test_a_run_without_a_calibrated_model_has_no_predictions(runs, page):
    Growing(runs / "first").grow(12)
    points(page, 12)
    page.locator("#network circle").first.wait_for()
    assert not page.locator("#predictions").is_visible()
    assert not page.locator("#doubt").is_visible()


def test_doubts_are_marked_and_listed(runs, page):
    run = Growing(runs / "first")
    run.grow(6, "renewed χ² 81 of 3")
    run.grow(3)
    points(page, 9)
    page.locator("#network circle").first.wait_for()
    assert count_pixels(save_picture(page, "J"), RED) == 0
    run.grow(1, "unexpected χ² 90 of 3; doubt: the calls disagree about the unknowns")
    run.grow(2)
    page.get_by_text("In doubt since iteration 9 (1 time): the calls disagree").wait_for()
    label = "document.getElementById('chart-J').getAttribute('aria-label')"
    until(page, f"{label}.includes('1 marked as doubts')")
    once = count_pixels(save_picture(page, "J"), RED)
    assert once > 300  # a triangle, and a line through the plot
    rows = page.locator("tr.doubt")
    assert rows.count() == 1
    assert "the calls disagree about the unknowns" in rows.first.inner_text()
    run.incident("doubt", "squared residuals are three times the noise")  # at iteration 12
    page.get_by_text("In doubt since iteration 9 (2 times)").wait_for()
    until(page, f"{label}.includes('2 marked as doubts')")
    assert count_pixels(save_picture(page, "J"), RED) > once + 100
    assert "squared residuals" in rows.first.inner_text()  # the latest is first


def test_names_are_text_and_not_code(runs, page):
    run = Growing(runs / "<img src=x onerror=alert(1)>")
    run.grow(2, "<script>alert(1)</script>")
    page.get_by_role("button", name="<img src=x onerror=alert(1)>").wait_for()
    page.get_by_role("cell", name="<script>alert(1)</script>").wait_for()
    assert page.locator("img").count() == 0


def test_a_page_left_open_does_not_grow(runs, page):
    run = Growing(runs / "first", every=500)
    run.grow(500)
    points(page, 500)
    page.locator("#network circle").first.wait_for()  # drawn after the curve
    nodes = "document.querySelectorAll('*').length"
    before = page.evaluate(nodes)
    for _ in range(6):
        run.grow(500)
    page.get_by_text("iteration 3,500").wait_for()
    until(
        page,
        "!document.getElementById('chart-J').getAttribute('aria-label').includes(': 500 points')",
    )
    drawn = page.evaluate("[...state.histories.values()].map(h => h.columns.J.length)")
    assert max(drawn) <= 2000
    assert page.evaluate(nodes) <= before + 5


def test_the_command_answers_for_known_runs_and_known_hosts_only(runs, address_of_command):
    from urllib.error import HTTPError
    from urllib.request import Request, urlopen

    def status(path, **headers):
        try:
            with urlopen(Request(address_of_command + path, headers=headers)) as answer:
                assert answer.headers["Content-Security-Policy"].startswith("default-src 'self'")
                return answer.status, answer.read()
        except HTTPError as error:
            return error.code, error.read()

    (runs.parent / "secret.csv").write_text("secret")
    Growing(runs / "first").grow(3)
    code, body = status("runs")
    assert code == 200
    number = json.loads(body)[0]["number"]
    assert status(f"runs/{number}/history")[0] == 200
    for path in (
        "runs/0/history",
        f"runs/{number}/theta/99",
        "../secret.csv",
        "..%2fsecret.csv",
        "server.py",
        "runs/..%2f..%2fsecret.csv/history",
        f"runs/{number}/history?from=x",
    ):
        assert status(path)[0] == 404, path
    assert status("runs", Host="elsewhere.example")[0] == 400


def test_instruments_are_shown_one_by_one(runs, page):
    run = Growing(runs / "bench")
    run.grow(8)
    run.measure(silent=(2,))
    page.get_by_role("heading", name="Instruments of bench").wait_for()
    table = page.locator("#device-rows tr")
    wait_until(lambda: table.count() == 3, interval=0.05)
    assert "silent" in table.nth(1).inner_text()
    assert "0.0700 ± 0.0020" in table.nth(0).inner_text()
    label = lambda id: page.locator(id).get_attribute("aria-label")
    assert "device 3: 8 points, from 0.2000 to 0.2700" in label("#chart-device-J")
    assert "device 2: 0 points" in label("#chart-device-J")
    assert "device 1: 8 points" in label("#chart-guard")
    assert page.locator("#drift-of option").all_inner_texts() == [
        "omega offset"
    ]  # the gain did not change
    assert "to 0.007" in label("#chart-drift")
    run.measure()
    until(page, "() => !document.getElementById('device-rows').textContent.includes('silent')")
