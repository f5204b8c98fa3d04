"""The paper's figures, and the measurements behind them."""
