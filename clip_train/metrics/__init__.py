"""What a run reports while it trains (progress, sinks) and afterwards (report)."""
