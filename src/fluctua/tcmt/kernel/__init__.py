"""Fused kernels for resonator networks: simulate, score and reduce in one pass."""
