"""Batch scripts for `sbatch`; `clip-train submit` fills them in. See docs/slurm.md."""
