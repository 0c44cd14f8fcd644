"""Other people's checkpoints, described in the entries of our own manifest, so that every verb works on them."""
