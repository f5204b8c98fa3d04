"""Ensembles larger than one process: shards of trajectories, who works on them, and their sum in
order.
"""
