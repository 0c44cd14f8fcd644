"""Other libraries' checkpoint APIs, with this engine behind them."""
