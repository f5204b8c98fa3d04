"""A run's folder, of any system: lock, history, checkpoints."""
