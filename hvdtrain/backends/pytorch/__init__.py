"""The session of a run in PyTorch."""
