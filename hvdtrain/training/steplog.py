"""Uses of the ranks' agreements on the steps of an epoch: progress bar, step lines, faults.

Among these is the limit of --plan: all ranks compare the same peaks of memory. A run that needs a
little more than its limit is reported and continues. It ends, with its state saved, if it exceeds
the limit by more than the reserve of the planner: then its prediction was wrong.
"""

import math
import time
from collections.abc import Sequence

import numpy as np

from hvdtrain.engine.control import SECONDS, Agreed, Stopped, Vitals
from hvdtrain.engine.progress import learning_rate
from hvdtrain.errors import CheckFailed, UsageError
from hvdtrain.health.stragglers import as_lists
from hvdtrain.planner.memory import GIB, RESERVE
from hvdtrain.training.run import Run
from hvdtrain.training.summary import weights_sha256

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
                run.journal.report(self.step, "straggler", str(straggler))
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
