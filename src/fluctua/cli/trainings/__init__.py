"""`fluctua train`: networks, trainings of one's own, and what both show."""
