"""The host: small arithmetic by NumPy, for which nothing is compiled, threads and folders."""
