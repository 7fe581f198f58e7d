"""Zero-shot classification and retrieval on the validation set, on any number of ranks."""
