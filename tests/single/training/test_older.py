"""Runs whose configuration is in the words of an earlier version."""

from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from hvdtrain.checkpoint.tensorfile import read_manifest
from tests.conftest import Program
from tests.single.training.jobs import summary_of

NOW = ("--loss", "cross-entropy:0.1", "--on-bad-step", "skip:50", "--weight-decay", 0.1)
THEN = {
    "loss": "cross-entropy",
    "label_smoothing": 0.1,
    "on_bad_step": "skip",
    "gradient_limit": 50.0,
    "no_decay": "norm,bias,position",
    "tf32": False,
    "min_ranks": 1,
    "memory_limit": None,
}


@pytest.mark.proves("A run that an earlier version started continues to the same bits.")
def test_a_run_goes_on_whose_options_had_other_names(
    hvdtrain: Program, small_set: Path, tmp_path: Path
) -> None:
    common = ("train", "--model", "cnn", "--data", small_set, "--batch-size", 100, *NOW)
    whole, parted = tmp_path / "whole", tmp_path / "parted"
    for run, steps in ((whole, 4), (parted, 2)):
        done = hvdtrain(*common, "--run", run, "--max-steps", steps)
        assert done.returncode == 0, done.stderr
    config = yaml.safe_load((parted / "config.yaml").read_text()) | THEN
    (parted / "config.yaml").write_text(yaml.safe_dump(config))
    (folder,) = parted.glob("checkpoints/step-*")
    saved = read_manifest(folder)
    saved = replace(saved, configuration=saved.configuration | THEN)
    (folder / "manifest.json").write_text(saved.to_json())
    other = (*common[:-6], "--weight-decay", 0.1)
    refused = hvdtrain(*other, "--run", parted, "--max-steps", 4, "--resume")
    assert refused.returncode == 2
    assert "loss was 'cross-entropy:0.1', is 'cross-entropy'" in refused.stderr
    # As Slurm's job does after a requeue.
    options = ("--config", parted / "config.yaml", "--run", parted, "--max-steps", 4)
    done = hvdtrain("train", *options, "--resume", "auto")
    assert done.returncode == 0, done.stderr
    assert summary_of(parted)["weights_sha256"] == summary_of(whole)["weights_sha256"]
    assert yaml.safe_load((parted / "config.yaml").read_text())["loss"] == "cross-entropy:0.1"
