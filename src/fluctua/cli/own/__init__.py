"""`fluctua bench own`: how fast processes are that a user writes."""
