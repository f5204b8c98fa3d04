"""`fluctua insitu`: the line to an instrument, plans, runs and the demo."""
