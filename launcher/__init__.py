"""From a command line or a SLURM job to a running trainer."""
