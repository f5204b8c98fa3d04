"""Estimates that are no gradients of recordings: simulated networks, responses in time."""
