"""The summary of a finished run."""

import resource
from typing import Any

import numpy as np
import torch

from hvdtrain.training import provenance
from hvdtrain.training.layout import weights_sha256
from hvdtrain.training.run import Run


def summarise(run: Run) -> dict[str, Any]:
    """The content of summary.json.

    Raises:
        CheckFailed: if ranks hold different weights.
    """
    session, progress = run.session, run.progress
    digest = weights_sha256(session)
    # Each rank's share of its own time: ranks that wait for another one do so on their clocks.
    own = max(progress.train_seconds, 1e-9)
    spent = [
        *(progress.exposed_seconds, progress.communication_seconds),
        *(progress.bubble_seconds, progress.compute_seconds),
    ]
    exposed, total, bubble, compute = np.mean(
        session.world.gather([seconds / own for seconds in spent]), axis=0
    )
    return {
        "model": session.config.model,
        "parameters": session.parameters,
        "ranks": session.world.size,
        "plan": session.plan.to_json(),
        "epochs": progress.position / len(session.train_rows),
        "steps": progress.step,
        "skipped_steps": progress.skipped_steps,
        "samples": progress.position,
        "seconds": progress.seconds,
        "startup_seconds": run.startup_seconds,
        "train_seconds": progress.train_seconds,
        "images_per_second": progress.position / max(progress.train_seconds, 1e-9),
        "communication": {"exposed_fraction": exposed, "total_fraction": total},
        "bubble_fraction": bubble,
        "compute_fraction": compute,
        "peak_memory_bytes": session.world.gather(_peak_memory(session.device)),
        "final": progress.final,
        "best": progress.best,
        "weights_sha256": digest,
        "machine": provenance.machine(session.device, session.world.threads),
        "versions": provenance.versions(),
    }


def _peak_memory(device: torch.device) -> int:
    """Bytes: the process's largest resident set, or the most the GPU had allocated."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
