"""What the estimators of `fluctua.core.estimator` are made of."""
