"""What an application hands us: statefuls, and the flattening of what they give to leaves under logical paths."""
