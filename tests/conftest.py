"""Tests run in float64: tolerances then speak of the equations and not of rounding."""

import jax

jax.config.update("jax_enable_x64", True)
