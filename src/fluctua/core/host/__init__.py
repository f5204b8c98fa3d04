"""Small arithmetic on the host, by NumPy: nothing is compiled for it."""
