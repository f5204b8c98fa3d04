"""Kernels whose arrays stay arrays: loops over matrices, and sums over groups of trajectories."""
