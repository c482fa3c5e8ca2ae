"""Chooses a plan: measures ranks and network, predicts steps, picks the fastest plan."""
