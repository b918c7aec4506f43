"""What a run leaves on disk: the format, writing, resuming."""
