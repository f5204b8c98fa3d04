"""Trainings of resonator lattices: what they are made of, and what came out."""
