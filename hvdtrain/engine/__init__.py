"""Interfaces between the training loop and a framework: sessions, control of steps, batches."""
