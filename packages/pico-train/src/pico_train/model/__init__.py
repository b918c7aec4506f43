"""The model: the decoder, its names in transformers, and how it writes text."""
