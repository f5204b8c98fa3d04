"""Learning: a training loop, the optimisers and the schedules of ensemble sizes."""
