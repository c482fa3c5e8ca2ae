"""Processes, files, memory, waiting and alerts: what the operating system provides."""
