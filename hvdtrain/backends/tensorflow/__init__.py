"""The session of a run in TensorFlow."""
