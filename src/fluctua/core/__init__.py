"""The theorem: processes, scores, returns, baselines, and the estimator made of them."""
