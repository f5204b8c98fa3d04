"""The code generator: one fused kernel of a user's own process, score, reward and reduction."""
