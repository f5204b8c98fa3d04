import os
import re
import sys
from pathlib import Path

import click
import typer
from sphinx.util import logging

from fluctua.cli.app import COMMANDS, app

sys.path.insert(0, str(Path(__file__).parent))
from gallery_settings import sphinx_gallery_conf  # noqa: F401

logger = logging.getLogger(__name__)
# Tutorials call `fluctua` as a reader would.
os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])

project = "fluctua"
copyright = "The Fluctua developers"
extensions = [
    "myst_nb",  # Markdown, and tutorials that are executed when the pages are built
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_gallery.gen_gallery",
    "sphinx-mathjax-offline",  # MathJax comes with the pages: they are read without a network too
]
mathjax_path = "mathjax/tex-chtml.js"
myst_enable_extensions = ["dollarmath", "amsmath", "colon_fence"]
myst_heading_anchors = 3
html_theme = "furo"
html_title = "fluctua"
html_static_path = ["static"]
html_css_files = ["fluctua.css", "gallery.css"]
html_js_files = ["pages.js"]
autodoc_member_order = "bysource"
autodoc_typehints = "none"
autodoc_preserve_defaults = True
default_role = "literal"
smartquotes = False  # `--set` is an option and no dash
napoleon_numpy_docstring = False
exclude_patterns = ["_build", "gallery/*.ipynb"]  # notebooks of the gallery are for download
nb_execution_mode = "force"
nb_execution_timeout = 600  # of a cell, in seconds
nb_execution_raise_on_error = True
nb_execution_in_temp = True
nb_merge_streams = True
nitpicky = True  # a role such as {py:func} names something of the reference, or the build fails

DOCS = Path(__file__).parent
REPOSITORY = "https://github.com/fluctua/fluctua"
linkcheck_ignore = [f"{REPOSITORY}/(blob|tree)/main/"]  # compared with the tree instead
LINK = re.compile(r"(?<!!)(\[[^\]]*\]\(|^\[[^\]]+\]: *)((?:\.\./)[^\s)#]+)", re.MULTILINE)


def link_repository(application, page, source):
    """Turn links to files outside of docs/ into addresses of the repository.

    The sources keep relative links, which work in a checkout too. A file that is missing is a
    warning, and `make docs` turns warnings into errors.
    """
    folder = (DOCS / page).parent

    def replace(match):
        target = (folder / match[2]).resolve()
        if target.is_relative_to(DOCS):
            return match[0]
        if not target.exists():
            logger.warning("%s links to %s, which does not exist", page, match[2])
        kind = "tree" if target.is_dir() else "blob"
        place = target.relative_to(DOCS.parent).as_posix()
        return f"{match[1]}{REPOSITORY}/{kind}/main/{place}"

    source[0] = LINK.sub(replace, source[0])


def plain_docstrings(application, what, name, obj, options, lines):
    """Escape what reStructuredText would read in a docstring, outside of code.

    The bar of a density p(x'|x) is no substitution, and the s of several `Record`s needs a break.
    """
    for i, line in enumerate(lines):
        if not line.lstrip().startswith((">>>", "...")):
            parts = line.split("`")
            line = "`".join(
                part.replace("|", r"\|") if k % 2 == 0 else part for k, part in enumerate(parts)
            )
            lines[i] = re.sub(r"(`[^`]+`)(?=s\b)", r"\1\\ ", line)


FIELD = re.compile(r"([a-z_]\w*(?:, [a-z_]\w*)*): (?=\S)")


def list_fields(application, what, name, obj, options, lines):
    """Turn the lines `field: meaning` of a record's docstring into the items of a list."""
    if what != "class":
        return
    listed = []
    within = False
    for line in lines:
        field = FIELD.match(line)
        if field:
            listed += ["", f"* ``{field[1]}``: {line[field.end() :]}"]
        elif within and line.startswith(" "):
            listed.append("  " + line.lstrip())
        elif within and line:
            listed += ["", line]
        else:
            listed.append(line)
        within = bool(field) or (within and line.startswith(" "))
    lines[:] = listed


def format_text(text):
    """A paragraph of a help text on one line, with options as code."""
    parts = " ".join(text.split()).split("`")
    parts[::2] = [re.sub(r"(?<!\w)--[a-z][\w-]*", r"`\g<0>`", part) for part in parts[::2]]
    return "`".join(parts)


def format_table(title, rows):
    """Markdown table with code in its first column."""
    lines = [f"| {title} | meaning |", "| --- | --- |"]
    for name, meaning in rows:
        name = name.replace("|", r"\|")
        meaning = format_text(meaning).replace("|", r"\|")
        lines.append(f"| `{name}` | {meaning} |")
    return "\n".join(lines)


def describe_parameter(parameter, context):
    """Name and meaning of an argument or option as the help has them, without types of Python."""
    name, meaning = parameter.get_help_record(context)
    name = re.sub(r" <(str|path|list\[\w+\])>", "", name).replace("<int range>", "<int>")
    return name, re.sub(r"default: \(([^()]*)\)", r"default: \1", meaning)


def describe_command(name, command, context):
    """Markdown of one command: usage, help, keys of --set, arguments and options."""
    with click.Context(command, info_name=name, parent=context) as inner:
        usage = " ".join(["fluctua", name, *command.collect_usage_pieces(inner)])
        shown = [p for p in command.params if not getattr(p, "hidden", False)]
        rows = [describe_parameter(p, inner) for p in shown if p.get_help_record(inner)]
    text, _, keys = (command.help or "").partition("\b\nKeys of --set:\n")
    parts = [format_text(paragraph) for paragraph in text.split("\n\n")]
    parts.append(format_table("argument or option", rows))
    if keys:
        rows = re.findall(r"^(\S+) +(.*(?:\n +.*)*)", keys, re.MULTILINE)
        parts.append(format_table("key of `--set`", rows))
    return "\n\n".join([f"## {name}", f"```bash\n{usage}\n```", *filter(None, parts)])


def write_commands(application):
    """Write reference/commands.md from the commands themselves."""
    group = typer.main.get_command(app)
    context = click.Context(group, info_name="fluctua")
    pages = [describe_command(name, group.get_command(context, name), context) for name in COMMANDS]
    page = "# Command line\n\n`fluctua COMMAND --help` prints the same text.\n\n" + "\n\n".join(
        pages
    )
    folder = Path(application.srcdir) / "reference"
    folder.mkdir(exist_ok=True)
    (folder / "commands.md").write_text(page + "\n", encoding="utf-8")


def setup(application):
    application.connect("builder-inited", write_commands)
    application.connect("source-read", link_repository)
    application.connect("autodoc-process-docstring", plain_docstrings)
    application.connect("autodoc-process-docstring", list_fields)
