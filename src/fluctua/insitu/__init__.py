"""In situ: instruments and recordings in place of a simulator."""
