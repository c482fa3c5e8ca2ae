"""The PyTorch runtime that executes the program of a plan: stages, transfers, updates."""
