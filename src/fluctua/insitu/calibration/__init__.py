"""Calibration: drift and noise from recordings, and how far to trust them."""
