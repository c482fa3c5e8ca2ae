"""Runs of the real runtime on ranks whose devices and links are modelled, not present."""
