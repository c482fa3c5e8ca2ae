"""Print what runs of a recipe reached, epoch by epoch, as CSV: the logs in recipes/logs.

python tools/recipe_log.py runs/94-study > recipes/logs/cifar10-94.csv
"""

import csv
import json
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import yaml

HEADS = (
    *("date", "machine", "hvdtrain", "torch", "model", "precision", "ranks", "threads", "seed"),
    *("epoch", "train_loss", "test_accuracy", "seconds", "images_per_second"),
)


def main(folders: list[str]) -> None:
    """Print the epochs of all finished runs in these folders."""
    writer = csv.writer(sys.stdout, lineterminator="\n")
    writer.writerow(HEADS)
    for folder in folders:
        for summary in sorted(Path(folder).glob("**/summary.json")):
            writer.writerows(_rows(summary.parent, json.loads(summary.read_text())))


def _rows(run: Path, summary: dict[str, Any]) -> list[list[Any]]:
    config = yaml.safe_load((run / "config.yaml").read_text())
    machine, versions = summary["machine"], summary["versions"]
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [
        [
            datetime.fromtimestamp(line["time"], UTC).date().isoformat(),
            _described(machine),
            versions["hvdtrain"],
            versions.get("torch"),
            summary["model"],
            config["precision"],
            summary["ranks"],
            machine["threads"],
            config["seed"],
            line["epoch"],
            line["train_loss"] and round(line["train_loss"], 5),
            line["test_accuracy"],
            round(line["seconds"], 1),
            round(line["images_per_second"], 1),
        ]
        for line in lines
        if line["event"] == "epoch"
    ]


def _described(machine: dict[str, Any]) -> str:
    accelerator = machine["accelerator"] or "no GPU"
    return f"{machine['processor']}, {machine['cores']} cores, {accelerator}"


if __name__ == "__main__":
    main(sys.argv[1:])
