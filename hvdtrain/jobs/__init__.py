"""Run training as Slurm jobs, through submitit."""
