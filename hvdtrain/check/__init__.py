"""Comparison of a plan with the serial run, step by step."""
