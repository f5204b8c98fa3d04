"""Code generator: one fused kernel of a user's process, score, reward and reduction."""
