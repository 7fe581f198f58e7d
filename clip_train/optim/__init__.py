"""Which parameters decay, how the learning rate moves, and which torch optimizer does the work."""
