"""Instruments: what one is, how to talk to it, and what to do when it fails."""
