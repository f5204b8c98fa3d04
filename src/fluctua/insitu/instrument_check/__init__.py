"""A check of an instrument against its model, before a training: knobs, records, repeatability."""
