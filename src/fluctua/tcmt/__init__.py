"""Resonator networks: temporal coupled-mode theory with noise."""
