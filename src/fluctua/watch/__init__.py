"""A page that follows trainings by reading their folders."""
