"""An application's statefuls, and the flattening of their state to leaves under logical paths."""
