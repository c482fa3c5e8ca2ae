"""Training: from a configuration to a run folder."""
