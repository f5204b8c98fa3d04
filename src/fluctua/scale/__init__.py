"""Ensembles larger than one process: shards of trajectories, workers, and sums in order."""
