"""Reading checkpoints from disk."""
