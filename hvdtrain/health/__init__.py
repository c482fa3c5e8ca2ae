"""Heartbeats, stragglers, bad steps, faults to rehearse, and how a failed rank ends the job."""
