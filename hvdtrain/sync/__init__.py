"""Ways in which the replicas of a stage agree: what travels between them, when, and over what."""
