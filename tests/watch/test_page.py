"""The page in a browser: it follows a run that grows, is killed and goes on, and fetches
nothing from elsewhere.
"""

import json
import shutil
import subprocess
import sys

import pytest

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
    page.errors, page.asked = [], []
    page.on("pageerror", lambda error: page.errors.append(str(error)))
    page.on("request", lambda request: page.asked.append(request.url))
    page.goto(address)
    yield page
    assert not page.errors
    assert all(url.startswith((address, "data:")) for url in page.asked)
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
    with page.expect_download() as picture:
        page.get_by_role("button", name="Picture").click()
    assert picture.value.suggested_filename == "fluctua-J.png"
    with page.expect_download() as data:
        page.get_by_role("link", name="history of").click()
    assert data.value.path().read_text().startswith("row,iteration,J,")


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


def test_the_server_answers_for_known_runs_and_known_hosts_only(runs, address):
    from urllib.error import HTTPError
    from urllib.request import Request, urlopen

    def status(path, **headers):
        try:
            with urlopen(Request(address + path, headers=headers)) as answer:
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
    assert table.count() == 3
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
