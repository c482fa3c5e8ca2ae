"""Uses of a trained model: evaluation, prediction, and export for other programs."""
