"""Checkpoints: tensors by parameter name, in one file per rank, independent of the plan."""
