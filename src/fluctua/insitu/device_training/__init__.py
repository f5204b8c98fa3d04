"""Training an instrument into a folder: plan, devices, session, and the loop over them."""
