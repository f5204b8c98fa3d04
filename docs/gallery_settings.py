"""Settings of the gallery: sphinx-gallery executes every example when the pages are built."""

import os
import re
import tempfile
import textwrap
import warnings
from pathlib import Path

import jax

FOLDER = tempfile.TemporaryDirectory()
"""Where examples with a run folder write, and everything else that is thrown away."""

NEEDS_FOLDER = ("own_run", "log_tensorboard", "log_wandb")
"""Examples whose argument is the folder of their run."""


def read_arguments(source: str) -> list[str]:
    """Arguments in "the gallery ran `python examples/NAME.py ARGUMENTS`" of a docstring."""
    command = re.search(r"the gallery ran\s+`python examples/\w+\.py ([^`]*)`", source)
    return command[1].split() if command else []


def choose_arguments(gallery_conf, script_vars):
    """`sys.argv[1:]` of an example."""
    source = Path(script_vars["src_file"])
    if source.stem in NEEDS_FOLDER:
        return [str(Path(FOLDER.name, source.stem))]
    return read_arguments(source.read_text(encoding="utf-8"))


def format_warning(message, category, *place):
    """A warning as it is shown: without the file of this machine that raised it."""
    return textwrap.fill(f"{category.__name__}: {message}", 90) + "\n"


def reset(gallery_conf, name):
    """Undo what an earlier example has set. Many of them run in one process."""
    jax.config.update("jax_enable_x64", False)
    jax.clear_caches()  # or the compiled functions of all examples stay in memory
    warnings.filterwarnings("default", module="fluctua")
    warnings.formatwarning = format_warning
    os.environ |= {"WANDB_MODE": "offline", "WANDB_SILENT": "true", "WANDB_DIR": FOLDER.name}


sphinx_gallery_conf = {
    "examples_dirs": "../examples",
    "gallery_dirs": "gallery",
    "filename_pattern": r"\.py$",
    "reset_modules": ("matplotlib", "gallery_settings.reset"),
    "reset_argv": "gallery_settings.choose_arguments",
    "backreferences_dir": "gallery/used",  # examples of a public name: `minigallery`
    "doc_module": ("fluctua",),
    "abort_on_example_error": True,
    "parallel": 2,  # much of an example is compiled on one core
    "thumbnail_size": (400, 200),
    "min_reported_time": 10,
    "write_computation_times": False,
    "download_all_examples": False,
    "show_signature": False,
    "copyfile_regex": "",
}
