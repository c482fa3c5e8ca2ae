"""Measures what a step costs on this machine and where its time goes: `hvdtrain bench`."""
