"""Markov processes that are not plain Itô processes: each supplies a transition and its score."""
