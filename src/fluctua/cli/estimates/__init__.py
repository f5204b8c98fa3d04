"""Estimates other than gradients from recordings: simulated networks, responses in time."""
