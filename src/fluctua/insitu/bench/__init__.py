"""The virtual bench: a box with hidden faults behind a socket."""
