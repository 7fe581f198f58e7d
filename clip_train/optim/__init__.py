"""Weight decay, the learning rate's schedule, and the torch optimizer."""
