"""Chooses a plan: measures what ranks and network take, predicts a step, picks the shortest."""
