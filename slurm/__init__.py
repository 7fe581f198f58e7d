"""Batch scripts, used as they are by `sbatch` and filled in by `clip-train submit`; docs/slurm.md."""
