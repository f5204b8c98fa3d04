"""Commands with a module of their own; `fluctua.cli` puts them together."""
