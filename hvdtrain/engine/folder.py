"""The run folder."""

from pathlib import Path


class RunFolder:
    """Paths of everything in a run folder."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = path / "config.yaml"
        self.metrics = path / "metrics.jsonl"
        self.summary = path / "summary.json"
        self.checkpoints = path / "checkpoints"
        self.tensorboard = path / "tensorboard"
        self.heartbeats = path / "heartbeats"
