"""`python -m fluctua` is `fluctua`."""

from fluctua.cli.app import app

app(prog_name="fluctua")
