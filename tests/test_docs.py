"""The documentation: names, files, links, commands and calls in it exist, and it reads easily."""

import ast
import importlib
import inspect
import re
from pathlib import Path

import pytest
import typer

import fluctua
from fluctua.learn.calibration_options import CalibrationOptions
from prose import find_remarks
from public_names import find_pages, find_public

DOCS = Path(__file__).resolve().parents[1] / "docs"
REFERENCE = [page for page in (DOCS / "reference").glob("*.md") if page.stem != "commands"]
"""Without the page that the build writes."""


def find(name):
    """The object of a dotted name, whose longest beginning that is a module is imported."""
    parts = name.split(".")
    for cut in range(len(parts) - 1, 0, -1):
        try:
            here = importlib.import_module(".".join(parts[:cut]))
        except ModuleNotFoundError:
            continue
        for part in parts[cut:]:
            here = getattr(here, part, None)
        return importlib.import_module(name) if here is None else here
    raise AssertionError(name)


def test_every_name_of_the_reference_exists():
    for name in find_pages():
        assert find(name) is not None, name


def test_the_reference_names_all_that_is_public():
    """Each with an entry, and with a row of the table that opens its page."""
    assert find_public().keys() - find_pages().keys() == set()
    rows = re.compile(r"^\| \{py:obj\}`\S+ <(\S+)>` \|", re.MULTILINE)
    shown = {name: page for page in REFERENCE for name in rows.findall(page.read_text())}
    assert shown.items() <= find_pages().items()
    assert find_public().keys() - shown.keys() == set()


def test_dotted_names_in_the_text_exist():
    pages = [
        *DOCS.glob("*.md"),
        *(DOCS.parent / "results").rglob("*.md"),
        *DOCS.parent.glob("[!C]*.md"),
    ]
    for page in (*pages, DOCS.parent / "CONTRIBUTING.md"):
        for name in re.findall(r"`(fluctua(?:\.\w+)+)", page.read_text()):
            assert find(name) is not None, f"{page.name}: {name}"


def test_files_in_the_text_exist():
    place = re.compile(r"`(?:python )?((?:src|tests|examples|benchmarks|docs|results)/[\w./]*\w)")
    pages = (*DOCS.glob("*.md"), DOCS.parent / "README.md", DOCS.parent / "CONTRIBUTING.md")
    named = {(page.name, name) for page in pages for name in place.findall(page.read_text())}
    assert {(page, name) for page, name in named if not (DOCS.parent / name).exists()} == set()


GENERATED = re.compile(r"docs/(reference/commands\.md|gallery/.*)")
"""Written when the pages are built, where Sphinx compares the links to them."""

HOME = re.compile(
    r"https://(?:github\.com|raw\.githubusercontent\.com)/fluctua/fluctua/(?:(?:blob|tree)/)?main/"
)


def slugs(page):
    """Anchors of a page: titles in small letters, without punctuation, hyphens for spaces."""
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    titles = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles}


def find_links(text):
    """Targets of the links of a page, those in code left out."""
    prose = re.sub(r"```.*?```|`[^`\n]*`", "code", text, flags=re.DOTALL)
    return re.findall(r"(?:\]\(|^\[[^\]]+\]: +)<?([^\s)>]+)", prose, re.MULTILINE)


def is_dead(link, folder):
    """Whether a link leads to a file or a title of this tree that does not exist."""
    path, _, anchor = link.partition("#")
    if HOME.match(path):
        target = ROOT / HOME.sub("", path)
    elif re.match(r"\w+:", path):
        return False
    else:
        target = (folder / path).resolve()
    if GENERATED.fullmatch(target.relative_to(ROOT).as_posix()):
        return False
    if not target.exists():
        return True
    return bool(anchor) and target.suffix == ".md" and anchor not in slugs(target)


def test_links_lead_to_files_and_titles_of_this_tree():
    """Relative ones, and addresses of the repository itself. Other sites: `make docs-links`."""
    dead = [
        f"{name_page(page)}: {link}"
        for page in [*PAGES, ROOT / "CHANGELOG.md"]
        for link in find_links(page.read_text())
        if is_dead(link, page if link.startswith("#") else page.parent)
    ]
    assert dead == []


@pytest.mark.parametrize(
    ("text", "dead"),
    [
        ("[a](docs/theory.md#derivation), ![b](docs/images/watch.png), [c](results)", []),
        (
            "[a](docs/absent.md) and [b](docs/theory.md#absent)",
            ["docs/absent.md", "docs/theory.md#absent"],
        ),
        (
            "[a]: https://github.com/fluctua/fluctua/blob/main/docs/absent.md",
            ["https://github.com/fluctua/fluctua/blob/main/docs/absent.md"],
        ),
        ("[a]: https://raw.githubusercontent.com/fluctua/fluctua/main/docs/images/watch.png", []),
        ("[a](https://optax.readthedocs.io) `[b](absent.md)`", []),
    ],
)
def test_dead_links_are_found(text, dead):
    assert [link for link in find_links(text) if is_dead(link, ROOT)] == dead


def test_links_of_the_readme_work_on_a_package_index():
    """They are absolute."""
    links = find_links((ROOT / "README.md").read_text())
    assert len(links) > 20
    assert [link for link in links if not link.startswith("https://")] == []


def test_titles_are_nouns():
    """At least they do not begin as questions, instructions or clauses do."""
    verbs = re.compile(
        r"^#+ (?!Which estimator\?$)"
        r"(What|Why|Which|How|When|Where|Who|Is|Do|Add|Read|Run|Use|Write|Make|In|From|To)\b",
        re.M,
    )
    pages = [*DOCS.glob("*.md"), *REFERENCE, *(DOCS.parent / "results").rglob("README.md")]
    pages += [DOCS.parent / name for name in ("README.md", "CONTRIBUTING.md")]
    prose = {
        page.as_posix(): re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
        for page in pages
    }
    assert {
        name: title.group() for name, text in prose.items() if (title := verbs.search(text))
    } == {}


def test_the_design_names_the_files_of_core():
    """Every file of core is in the table of its files, and every name there is a file."""
    table = (DOCS / "design.md").read_text().split("## Files of core")[1].split("##")[0]
    named = set(re.findall(r"`(\w+\.py|\w+/)`", table))
    core = DOCS.parent / "src" / "fluctua" / "core"
    files = {path.name for path in core.glob("*.py")} - {"__init__.py"}
    assert named == files | {f"{path.parent.name}/" for path in core.glob("*/__init__.py")}


def test_the_design_shows_the_tree():
    """Every folder of the package with a line, indented as it lies."""
    page = (DOCS / "design.md").read_text()
    drawn = re.findall(
        r"^( +)(\w+)/ ", page.split("src/fluctua/\n")[1].split("\ntests/")[0], re.MULTILINE
    )
    folders, above = set(), ""
    for indent, name in drawn:
        above = name if len(indent) == 2 else above
        folders.add(name if len(indent) == 2 else f"{above}/{name}")
    package = DOCS.parent / "src" / "fluctua"
    assert folders == {
        path.parent.relative_to(package).as_posix() for path in package.rglob("__init__.py")
    } - {"."}


ROOT = DOCS.parent
PAGES = sorted(
    [
        *DOCS.glob("*.md"),
        *REFERENCE,
        *(DOCS / "tutorials").glob("*.md"),
        *(ROOT / "results").rglob("README.md"),
        ROOT / "README.md",
        ROOT / "CONTRIBUTING.md",
    ]
)


def name_page(page):
    return page.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("page", PAGES, ids=name_page)
def test_pages_read_easily(page):
    """Short paragraphs and cells, headings, "per iteration", no persons: tests/support/prose.py."""
    remarks = [f"{r.line}: {r.rule}: {r.text[:60]}" for r in find_remarks(page.read_text())]
    assert remarks == []


MODULES = {
    "fl": "fluctua",
    "fluctua": "fluctua",
    "tcmt": "fluctua.tcmt",
    "insitu": "fluctua.insitu",
}


def find_object(node):
    """The object of the library that an expression such as `fl.baselines.mean` names, or None."""
    names = []
    while isinstance(node, ast.Attribute):
        names.append(node.attr)
        node = node.value
    if not isinstance(node, ast.Name) or node.id not in MODULES or not names:
        return None
    return find(".".join([MODULES[node.id], *reversed(names)]))


def check_call(call):
    """A call in an example has arguments that its function takes."""
    function = find_object(call.func)
    if function is None or any(isinstance(argument, ast.Starred) for argument in call.args):
        return
    given = inspect.signature(function)
    names = [keyword.arg for keyword in call.keywords if keyword.arg]
    shown = ast.unparse(call)
    try:
        if "..." in shown:
            given.bind_partial(**dict.fromkeys(names))
        else:
            given.bind(*call.args, **dict.fromkeys(names))
    except TypeError as error:
        raise AssertionError(f"{shown}: {error}") from error


@pytest.mark.parametrize("page", PAGES, ids=name_page)
def test_code_calls_the_library_as_it_is(page):
    """Names in Python examples exist, and calls have arguments that are accepted."""
    for block in re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL):
        for node in ast.walk(ast.parse(block)):
            if isinstance(node, ast.Attribute):
                find_object(node)
            if isinstance(node, ast.Call):
                check_call(node)


def test_calls_in_the_text_name_arguments_that_exist():
    """The same for code within a sentence, such as `fl.ppgt(..., baseline=...)`."""
    for page in PAGES:
        prose = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
        for code in re.findall(r"`((?:fl|insitu|tcmt|fluctua)\.\w[^`\n]*)`", prose):
            try:
                tree = ast.parse(code)
            except SyntaxError:
                continue
            for node in ast.walk(tree):
                if isinstance(node, ast.Attribute):
                    assert find_object(node) is not None, f"{page.name}: {code}"
                if isinstance(node, ast.Call):
                    function = find_object(node.func)
                    names = {keyword.arg for keyword in node.keywords}
                    known = inspect.signature(function).parameters if function else names
                    if function is fluctua.SelfCalibrating:  # its keywords are those of a record
                        known = {*known, *CalibrationOptions.__dataclass_fields__}
                    assert names <= set(known), f"{page.name}: {code}"


def find_commands(page):
    """Calls of `fluctua` in a page, as lists of words: code blocks and code within sentences."""
    text = page.read_text().replace("\\\n", " ")
    blocks = re.findall(r"```(?:bash|sh|console)\n(.*?)```", text, re.DOTALL)
    lines = [line for block in blocks for line in block.splitlines()]
    lines += re.findall(r"`(fluctua [^`]*)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL))
    found = (re.search(r"(?<![\w/.])fluctua (\w[^#;&|']*)", line) for line in lines)
    return [match.group(1).split() for match in found if match]


def find_unknown_option(command, words):
    """The first word that is no sub-command or option of a command, or an empty text."""
    while words and hasattr(command, "get_command"):
        below = command.get_command(None, words[0])
        if below is None:
            return "" if words[0].startswith("-") else words[0]
        command = below
        words = words[1:]
    known = {name for option in command.params for name in (*option.opts, *option.secondary_opts)}
    options = (word.split("=")[0].rstrip(",).:") for word in words if word.startswith("--"))
    return next((name for name in options if name not in {*known, "--help"}), "")


def test_commands_in_the_text_exist():
    app = typer.main.get_command(importlib.import_module("fluctua.cli.app").app)
    wrong = [
        f"{name_page(page)}: fluctua {' '.join(words)}: {unknown}"
        for page in PAGES
        for words in find_commands(page)
        if (unknown := find_unknown_option(app, words))
    ]
    assert wrong == []


OTHER_OPTIONS = {"--tune", "--kernels-only", "--kind"}
"""Of benchmarks and examples, whose name is in the sentence before."""


def test_options_in_the_text_exist():
    """Code within a sentence that begins with an option, such as `--set pilot=400`."""
    app = typer.main.get_command(importlib.import_module("fluctua.cli.app").app)
    commands = [app.get_command(None, name) for name in app.list_commands(None)]
    known = {name for command in commands for option in command.params for name in option.opts}
    named = {
        (name_page(page), option)
        for page in PAGES
        if page.is_relative_to(DOCS)
        for option in re.findall(r"`(--[a-z][\w-]*)", page.read_text())
    }
    assert {(page, o) for page, o in named if o not in known | OTHER_OPTIONS} == set()
