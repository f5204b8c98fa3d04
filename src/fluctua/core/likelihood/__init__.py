"""Residuals of trajectories against a process: their standardised form, and tests of it against
common faults.
"""
