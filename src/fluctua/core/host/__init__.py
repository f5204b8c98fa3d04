"""Work on the host: arithmetic by NumPy without compilation, threads, the cache folder."""
