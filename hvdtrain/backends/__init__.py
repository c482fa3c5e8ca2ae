"""The frameworks that compute a run."""
