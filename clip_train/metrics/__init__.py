"""Reports of a run: during training (progress, sinks) and afterwards (report)."""
