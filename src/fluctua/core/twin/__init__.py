"""The twin correction: its records and one step (`correction`), and all trajectories (`sweep`)."""
