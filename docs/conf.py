import re

project = "fluctua"
copyright = "The Fluctua developers"
extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx-mathjax-offline",  # MathJax comes with the pages: they are read without a network too
]
mathjax_path = "mathjax/tex-chtml.js"
myst_enable_extensions = ["dollarmath", "amsmath", "colon_fence"]
myst_heading_anchors = 3
html_theme = "furo"
html_title = "fluctua"
html_static_path = ["static"]
html_css_files = ["fluctua.css"]
autodoc_member_order = "bysource"
autodoc_typehints = "none"
autodoc_preserve_defaults = True
default_role = "literal"
napoleon_numpy_docstring = False
exclude_patterns = ["_build"]
suppress_warnings = ["myst.xref_missing"]


def plain_docstrings(app, what, name, obj, options, lines):
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


def setup(app):
    app.connect("autodoc-process-docstring", plain_docstrings)
