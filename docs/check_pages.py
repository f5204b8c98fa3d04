"""Open the built pages in a browser, from disk and without a network, and report what is wrong.

    python docs/check_pages.py docs/_build/html [--screenshots FOLDER]

It fails on errors of scripts, files from elsewhere, equations that are not rendered, images that
are missing, pages wider than the screen, code wider than its block on a desktop, and searches
without the page that they should find. `make docs` runs it. Without Chromium nothing is opened,
and a line reports it.
"""

import argparse
import shutil
import sys
from pathlib import Path

from playwright.sync_api import sync_playwright

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
WIDTHS = {"desktop": 1280, "phone": 390}
SEARCHES = {
    "noiseless": "sharp_edges.html",
    "which estimator": "which_estimator.html",
    "return-to-go": "glossary.html",
    "first passage": "first_passage.html",
    "fluctua.gradient": "reference/",
    "own process": "tutorials/own_process.html",
}
"""Words that a reader may type, and the beginning of the address of a page that has to be found."""

WAIT_FOR_EQUATIONS = "window.MathJax?.startup?.promise.then(() => true) ?? true"
WAIT_FOR_LAYOUT = "() => new Promise(drawn => requestAnimationFrame(() => setTimeout(drawn)))"
EQUATIONS = """() => [...document.querySelectorAll('.math')]
    .filter(node => !node.querySelector('mjx-container') || node.querySelector('mjx-merror'))
    .map(node => node.textContent.trim().slice(0, 60))"""
IMAGES = """() => [...document.images]
    .filter(image => image.loading !== 'lazy' && !image.naturalWidth).map(image => image.src)"""
# An element may scroll by itself; what is only cut off at the edge counts.
WIDE = """() => {
  const width = document.documentElement.clientWidth;
  const scrolls = node => node.tagName !== 'ARTICLE'
    && (['auto', 'scroll'].includes(getComputedStyle(node).overflowX)
      || scrolls(node.parentElement));
  const wide = [...document.querySelectorAll('article *')]
    .filter(node => node.getBoundingClientRect().right > width + 1)
    .filter(node => !node.closest('mjx-assistive-mml') && !scrolls(node))
    .map(node => `${node.tagName.toLowerCase()} ${node.textContent.trim().slice(0, 50)}`);
  const page = document.documentElement.scrollWidth > width ? ['the page itself'] : [];
  return [...wide.slice(0, 3), ...page];
}"""
WIDE_CODE = """() => [...document.querySelectorAll('article pre')]
    .filter(node => node.scrollWidth > node.clientWidth + 1)
    .map(node => [...node.textContent.split('\\n')].sort((a, b) => b.length - a.length)[0])"""

SEARCHED = "document.querySelector('#search-results .search-summary')?.innerText.match(/search/i)"


def find_browser():
    """Path of Chromium on this machine, or None."""
    return next(filter(None, map(shutil.which, BROWSERS)), None)


def list_pages(folder):
    """Pages of the documentation, without listings of source files."""
    pages = sorted(folder.rglob("*.html"))
    return [page for page in pages if "_modules" not in page.parts and "_static" not in page.parts]


def open_context(browser, width, scheme="light"):
    """A window without a network: what is not on this disk is an error of the page."""
    size = {"width": width, "height": 900}
    context = browser.new_context(viewport=size, color_scheme=scheme, offline=True)
    context.set_default_timeout(60_000)
    return context


def watch_errors(page):
    """List to which errors of scripts and addresses elsewhere are added."""
    errors = []
    page.on("pageerror", lambda error: errors.append(f"script: {error}"))
    page.on(
        "console",
        lambda message: message.type == "error" and errors.append(f"console: {message.text}"),
    )
    page.on(
        "request",
        lambda request: request.url.startswith("http") and errors.append(f"fetches {request.url}"),
    )
    return errors


def check_page(page, width):
    """What is wrong with the page that is open, as lines of text."""
    page.evaluate(WAIT_FOR_EQUATIONS)
    page.evaluate(WAIT_FOR_LAYOUT)
    found = [f"equation: {text}" for text in page.evaluate(EQUATIONS)]
    found += [f"image: {source}" for source in page.evaluate(IMAGES)]
    found += [f"wider than {width} pixels: {text}" for text in page.evaluate(WIDE)]
    if width == WIDTHS["desktop"]:
        found += [f"code wider than its block: {line}" for line in page.evaluate(WIDE_CODE)]
    return found


def check_search(browser, folder):
    """Searches typed into the first page that do not find what they should."""
    found = []
    context = open_context(browser, WIDTHS["desktop"])
    page = context.new_page()
    errors = watch_errors(page)
    for words, expected in SEARCHES.items():
        page.goto((folder / "index.html").as_uri())
        page.fill("input.sidebar-search", words)
        page.press("input.sidebar-search", "Enter")
        page.wait_for_function(
            "document.querySelector('#search-results p')?.innerText.match(/\\d/)"
        )
        links = page.eval_on_selector_all(
            "#search-results li a", "links => links.map(link => link.getAttribute('href'))"
        )
        if not any(link.startswith(expected) for link in links):
            found.append(f"search for {words!r} does not find {expected}, but {links[:5]}")
    context.close()
    return found + errors


def take_pictures(browser, folder, pages, pictures):
    """Save each page as a desktop shows it, light and dark, and as a phone does."""
    pictures.mkdir(parents=True, exist_ok=True)
    for name, scheme in (("desktop", "light"), ("desktop", "dark"), ("phone", "light")):
        context = open_context(browser, WIDTHS[name], scheme)
        page = context.new_page()
        for path in pages:
            page.goto(path.as_uri())
            page.evaluate(WAIT_FOR_EQUATIONS)
            title = "-".join(path.relative_to(folder).with_suffix("").parts)
            page.screenshot(path=pictures / f"{title}-{name}-{scheme}.png", full_page=True)
        context.close()


def check_site(browser, folder):
    """Everything that is wrong with the pages of a folder, as lines of text."""
    found = []
    context = open_context(browser, WIDTHS["desktop"])
    for path in list_pages(folder):
        page = context.new_page()
        errors = watch_errors(page)
        page.goto(path.as_uri())
        name = path.relative_to(folder).as_posix()
        for width in WIDTHS.values():
            page.set_viewport_size({"width": width, "height": 900})
            found += [f"{name}: {text}" for text in check_page(page, width)]
        found += [f"{name}: {text}" for text in errors]
        page.close()
    context.close()
    return list(dict.fromkeys(found + check_search(browser, folder)))


def main():
    """Check the pages that the command line names, print what is wrong, and exit with 1 for it."""
    parser = argparse.ArgumentParser(description="Check the built documentation in a browser.")
    parser.add_argument("folder", type=Path, help="the built pages, docs/_build/html")
    parser.add_argument("--screenshots", type=Path, help="also save a picture of each page here")
    options = parser.parse_args()
    folder = options.folder.resolve()
    program = find_browser()
    if program is None:
        print("no Chromium on this machine: the pages were built and not opened in a browser")
        return
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=program, args=["--no-sandbox"])
        found = check_site(browser, folder)
        if options.screenshots:
            take_pictures(browser, folder, list_pages(folder), options.screenshots)
        browser.close()
    print("\n".join(found) or f"{len(list_pages(folder))} pages opened in a browser: all in order")
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
