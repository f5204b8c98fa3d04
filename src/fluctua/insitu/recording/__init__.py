"""Recordings: trajectories on disk, written, read, looked at and described."""
