"""Figures, one module each. A figure is drawn from results and never computes any."""
