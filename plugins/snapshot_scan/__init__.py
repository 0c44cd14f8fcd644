"""What a checkpoint would run if it was opened: the names in its pickles, model code, and suspicious archives."""
