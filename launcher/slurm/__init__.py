"""Jobs that requeue themselves: submitting, and the batch script's half."""
