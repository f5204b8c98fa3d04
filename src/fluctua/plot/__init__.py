"""Figures of networks and trainings. A figure is drawn from results and never computes any."""
