"""Runs as jobs of Slurm, through submitit."""
