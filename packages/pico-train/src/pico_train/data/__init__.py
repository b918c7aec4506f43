"""From text to batches: sources of documents, tokenizer, token cache, order of samples, batches."""
