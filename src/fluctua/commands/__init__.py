"""The commands, one module each: a thin layer over a library call. `fluctua.cli` registers them."""
