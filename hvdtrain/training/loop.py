"""The training loop of a run: its start, its steps, its evaluations and its end."""

import atexit
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from hvdtrain.checkpoint.restore import repair_records
from hvdtrain.config import TrainConfig
from hvdtrain.configfile import as_started, public
from hvdtrain.data import order
from hvdtrain.data.order import Loader
from hvdtrain.engine.feed import Feed, Feeder, Request, requests, training_feeder, watched
from hvdtrain.engine.progress import (
    Agreed,
    Flags,
    Stopped,
    Stopwatch,
    Vitals,
    learning_rate,
    stop_code,
)
from hvdtrain.engine.session import PendingStep, Session, StepInput, StepOutcome
from hvdtrain.errors import CheckFailed, Interrupted, Preempted, UsageError
from hvdtrain.health import failure
from hvdtrain.health.stragglers import Stragglers, Trends, groups_of_equal_work
from hvdtrain.host import output
from hvdtrain.host.activity import Activity
from hvdtrain.host.launchers import needs_mpi
from hvdtrain.host.ownership import LAUNCHED, process_start, since_boot
from hvdtrain.host.process import StopRequest
from hvdtrain.options.givenmodel import SEAMS
from hvdtrain.training.console import Callbacks, Console
from hvdtrain.training.metrics import summary_of_finished
from hvdtrain.training.run import Run, open_run
from hvdtrain.training.starts import NO_TENSORFLOW, check_seams
from hvdtrain.training.summary import (
    StepLog,
    TrainResult,
    agreed_excess,
    announce,
    check_memory,
    check_replicas,
    compare_fingerprints,
    expectation_line,
    summarise,
)
from hvdtrain.world import World
from hvdtrain.world import start as start_world
from hvdtrain.world import stop as stop_world

TRACED_STEPS = 20


@dataclass
class StartClock:
    """Seconds from the command to the first step of this process, by phase.

    Another launcher does not tell when it was started: then they count from the start of this
    process.

    Attributes:
        last: when the last phase ended, in seconds since boot.
        seconds: by phase, in their order.
    """

    last: float = field(default_factory=process_start)
    seconds: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if (launched := os.environ.pop(LAUNCHED, None)) is not None:
            self.seconds["launch"] = max(0.0, self.last - float(launched))

    def mark(self, phase: str) -> None:
        """Count the seconds since the last mark for a phase."""
        now = since_boot()
        self.seconds[phase] = self.seconds.get(phase, 0.0) + now - self.last
        self.last = now


def train(
    config: TrainConfig, stop: StopRequest | None = None, callbacks: Callbacks = ()
) -> TrainResult:
    """Train on the ranks of the launcher that started this process, and return the summary.

    Args:
        config: the configuration of the run.
        stop: signals that are watched already; by default they are watched during this call.
        callbacks: called on rank 0.

    Raises:
        UsageError, DataError: for any mistake of the user; UsageError, too, if another start of
            the run takes the run folder over.
        CheckFailed: at a bad step that is not skipped, or if ranks end with different weights.
        Interrupted, Preempted: if the run received a stop signal; its state is saved.
    """
    config.check()
    with nullcontext(stop) if stop else StopRequest() as stop:
        clock = StartClock()
        clock.mark("python")
        world = start_world(config.allreduce, config.threads, config.bind, by_torch=True)
        ended: list[Activity] = []
        # Registered first, so that it is called after what the model's code registers.
        atexit.register(_note_the_end, ended)
        if world.size > 1:
            failure.end_all_on_exception()
        clock.mark("mpi")
        # First: as_started reads the version of a run from its records.
        repair_records(config, world)
        resolved, lines = world.broadcast(as_started(config) if world.rank == 0 else None)
        finished = world.broadcast(summary_of_finished(resolved) if world.rank == 0 else None)
        if finished is not None:
            Console(world.rank, launched=True).say(f"{resolved.run} is done already")
            stop_world()
            return TrainResult(finished, Path(resolved.run))
        # The configuration of rank 0 came without what was passed in Python.
        passed = {name: getattr(config, name) for name in ("model", *SEAMS)}
        resolved = replace(resolved, **passed)
        check_seams(resolved)
        run = open_run(open_session(resolved, world, clock.mark), stop, callbacks)
        for line in lines:
            run.console.say(line)
        try:
            summary = _train(run, clock)
        except BaseException as error:
            if isinstance(error, UsageError):  # the folder belongs to another run by now
                run.saving.saver.withdraw()
            run.heartbeat.give_up()
            raise
        finally:
            if run.journal.records is not None:
                run.journal.records.close()
        _leave_world(run)
        run.session.close()
        ended.append(run.activity)
    return TrainResult(summary, run.journal.folder.path)


def _leave_world(run: Run) -> None:
    """Leave MPI and Horovod. Collective; a rank that hangs before this is reported first."""
    with run.activity.doing("leaving with all ranks", after_others=True):
        stop_world()


def _note_the_end(ended: Sequence[Activity]) -> None:
    """Note that this rank waits for MPI to end, which waits for all ranks."""
    for activity in ended:
        activity.note("ending with all ranks", after_others=True)


def _train(run: Run, clock: StartClock) -> dict[str, Any]:
    """Run epochs, evaluations and checkpoints to the end of the run; return the summary."""
    begin(run, clock)
    try:
        evaluate_end(run)
        while not run.complete:
            _train_and_evaluate(run)
    except Stopped as stopped:
        _leave(run, stopped.code)
    if not run.saving.finish():
        run.saving.save()
    run.clock.count()
    if run.session.timeline is not None:
        run.session.timeline.write()
    with run.activity.doing("summing up the run"):
        summary = summarise(run, clock.seconds)
    check_memory(run, summary["peak_memory_bytes"])  # the run is over: it ends as usual
    run.close(summary)
    run.journal.followers.call("on_end", summary)
    run.console.say(
        f"trained {summary['samples']:,} samples in {summary['train_seconds']:.1f} s "
        f"({summary['images_per_second']:,.0f} images/s on {run.session.world.size} rank(s)); "
        f"{run.journal.folder.path}"
    )
    if line := expectation_line(summary):
        run.console.say(line)
    return summary


def _train_and_evaluate(run: Run) -> None:
    """Train an epoch, or the rest of it, evaluate, and save a checkpoint if one is due.

    Raises:
        Stopped: on all ranks, if any of them received a stop signal.
    """
    try:
        _check_signals(run)
        if not run.epoch_end_due:
            _train_epoch(run)
        with run.activity.doing("agreeing with the other replicas"):
            run.session.meet()
        check_replicas(run)
    except CheckFailed:  # on all ranks at the same step
        run.saving.finish()
        run.close(None)
        raise
    due = run.saving.is_due_after_epoch(run.trained)
    end_epoch(run, may_be_best=due)
    if due:
        run.saving.begin()


def _check_signals(run: Run) -> None:
    """Agree before an epoch whether to stop: starting and evaluating may have taken long.

    Collective.

    Raises:
        Stopped: on all ranks, if any of them received a stop signal.
    """
    with run.activity.doing("agreeing with all ranks on whether to start an epoch"):
        signals = run.session.world.gather((run.stop.interrupted, run.stop.preempted))
    interrupted, preempted = map(any, zip(*signals, strict=True))
    code = stop_code(interrupted, preempted)
    if code is not None:
        raise Stopped(code)


def _train_epoch(run: Run) -> None:
    """Train to the end of the epoch.

    Raises:
        Stopped: on all ranks, if they agreed to stop earlier.
    """
    length = len(run.session.train_rows)
    if _is_scheduled(run):
        _schedule(run)
    _train_under_plan(run)
    while not (run.trained or run.progress.position % length == 0):
        _change_plan(run)
        _train_under_plan(run)


def _is_scheduled(run: Run) -> bool:
    """Return whether --schedule-every requests a choice before the epoch that starts now."""
    every, progress = run.session.config.schedule_every, run.progress
    if run.adapter is None or not every or progress.position == run.before.position:
        return False
    return progress.position % (every * len(run.session.train_rows)) == 0


def _schedule(run: Run) -> None:
    """Profile and solve again, and migrate if that pays. Collective."""
    assert run.adapter is not None
    epoch = run.progress.position // len(run.session.train_rows) + 1
    clock = Stopwatch(run.progress, "train_seconds", run.session.device)
    others_wait = run.session.world.rank > 0
    with run.activity.doing("choosing the plan again", after_others=others_wait):
        changes, kept = run.adapter.schedule(f"epoch {epoch}")
    clock.count()
    for decision in kept:
        _say_decision(run, decision)
    if changes:
        _change_plan(run)


def _change_plan(run: Run) -> None:
    """Migrate to the plan that rank 0 has chosen. Collective; no agreement is under way."""
    assert run.adapter is not None
    clock = Stopwatch(run.progress, "train_seconds", run.session.device)
    with run.activity.doing("changing the plan"):
        decision = run.adapter.change()
    clock.count()  # a migration has to pay for its own time
    run.stragglers = Stragglers(groups_of_equal_work(run.session.plan, run.session.world.size))
    run.trends = Trends()
    if decision is not None:
        _say_decision(run, decision)


def _say_decision(run: Run, decision: dict[str, Any]) -> None:
    """Record and print a decision on the plan; on rank 0."""
    plan = run.session.plan.to_json() | {"devices_a_rank": run.session.device.count}
    run.journal.event("plan", step=run.progress.step, **plan, **decision)
    run.console.say(
        f"step {run.progress.step:,}: {decision['cause']}: "
        f"{decision['decision']}: {decision['reason']}"
    )
    if decision["decision"] == "change":
        run.console.say_plan(run.session.plan)


def _train_under_plan(run: Run) -> None:
    """Train to the end of the epoch or to a migration.

    Raises:
        Stopped: on all ranks, if they agreed to stop earlier.
    """
    session, progress, config = run.session, run.progress, run.session.config
    length = len(session.train_rows)
    if session.timeline is not None:
        session.timeline.align()
    epoch, offset = order.locate(progress.position, length)
    run.step_ended = None
    clock = Stopwatch(progress, "train_seconds", session.device)
    rows = order.training_order(session.index, session.train_rows, config.seed, epoch)
    last = config.total_samples(length) - epoch * length
    slices = [
        piece for piece in order.step_slices(length, config.batch_size, offset) if piece[0] < last
    ]
    log = StepLog(run, epoch, length)
    feeder = training_feeder(config, session.splits["train"], epoch, session.is_resident)
    row_requests = requests(rows, slices, partial(session.local_rows, is_training=True))
    loader = Loader(feeder, row_requests)
    epochs = math.ceil(config.total_samples(length) / length)
    with run.console.bar(f"epoch {epoch + 1}/{epochs}", len(slices)), loader:
        with suppress(Stopped):  # until the agreements on all steps are read
            _train_steps(run, log, slices, loader, clock)
        log.drain()
    log.flush()
    clock.count()
    log.check_stop()


def _train_steps(
    run: Run,
    log: StepLog,
    slices: Sequence[order.Range],
    loader: Loader[Request, Feed],
    clock: Stopwatch,
) -> None:
    """Train on each global batch of `slices`, up to a migration.

    What may follow a step inside the epoch follows the last step after the epoch.

    Raises:
        Stopped: on all ranks, as soon as they agree to stop.
    """
    feeds = watched(loader, run.activity)
    for (start, end), feed in zip(slices, feeds, strict=True):
        agreed = _step(run, feed, log.epoch, end - start, loader.last_wait)
        if agreed is not None:
            log.add(agreed)
            log.check_stop()
        if (start, end) == slices[-1]:
            continue
        compare_fingerprints(run, log)
        if run.saving.is_due(agreed):
            _save_within_epoch(run, log, clock)
        if _is_change_due(run, agreed):
            return


def _save_within_epoch(run: Run, log: StepLog, clock: Stopwatch) -> None:
    """Start a checkpoint, unless the ranks agree to stop, which saves too."""
    log.drain()
    clock.count()
    log.check_stop()
    log.flush()
    run.saving.begin()


def _is_change_due(run: Run, agreed: Agreed | None) -> bool:
    """Return whether all ranks migrate now; on rank 0 the adapter follows the step."""
    if run.adapter is None or agreed is None:
        return False
    config, length = run.session.config, len(run.session.train_rows)
    left = config.total_samples(length) - run.progress.position
    for decision in run.adapter.follow(agreed, left // config.batch_size):
        _say_decision(run, decision)
    profile = run.adapter.profile()
    if profile is not None:
        run.journal.event("profile", step=run.progress.step, **profile)
    return agreed.change and not run.adapter.begins_survey()


def _step(run: Run, feed: Feed, epoch: int, batch_size: int, data_seconds: float) -> Agreed | None:
    """Run one step of all ranks; return the agreement on an earlier step."""
    session, progress, config = run.session, run.progress, run.session.config
    if run.heartbeat.is_replaced:
        run.heartbeat.owner.check()
    started = time.perf_counter()
    progress.step += 1
    run.activity.step(progress.step)
    if run.injector is not None:
        run.injector.before(progress.step, run.saving.saver.is_uncommitted)
    rate = learning_rate(config, len(session.train_rows), progress.position)
    step = StepInput(progress.step, progress.position, batch_size, feed, rate, progress.loss_scale)
    pending = session.train(step)
    if config.precision == "fp16":
        progress.scale_loss(not math.isfinite(pending.norm))
    run.recent.append((step, pending.norm))
    progress.position += batch_size
    if config.ledger and not pending.is_bad:
        stem = f"{epoch + 1},{progress.step},{session.world.rank}"
        run.journal.ledger += [f"{stem},{sample}\n" for sample in feed.ids.tolist()]
    if session.timeline is not None and progress.step - run.before.step == TRACED_STEPS:
        session.timeline.write()
    seconds, ended = time.perf_counter() - started, time.perf_counter()
    if session.device.loss_delay and run.step_ended is not None:
        # The host does not wait for a GPU within a step, but before the next one.
        seconds = ended - run.step_ended - data_seconds
    run.step_ended = ended
    vitals = _vitals(run, seconds, data_seconds)
    with run.activity.doing("agreeing with all ranks on an earlier step"):
        agreed, outcomes = run.control.post(pending, _flags(run), vitals)
    run.count(outcomes)
    return agreed


def _flags(run: Run) -> Flags:
    return Flags(
        interrupted=run.stop.interrupted,
        preempted=run.stop.preempted,
        save=run.saving.is_wanted(),
        written=run.saving.saver.written,
        failed=run.saving.saver.failed,
        change=run.adapter is not None and run.adapter.wants_change,
    )


def _vitals(run: Run, seconds: float, data_seconds: float) -> Vitals:
    """Return the vitals of this rank in a step.

    Args:
        seconds: duration of the step without the wait for its data, `data_seconds`.
    """
    whole, memory = data_seconds + seconds, run.heartbeat.memory_bytes
    if run.session.config.memory_gib is not None:
        peak = run.session.device.peak_memory_bytes()
        memory = peak if peak > run.peak_before else memory  # the planner may have needed more
    return Vitals(
        seconds=whole,
        own_seconds=whole,
        data_seconds=data_seconds,
        memory_bytes=memory,
        load=run.heartbeat.load,
    )


def _leave(run: Run, code: int) -> None:
    """Save the state if it is not saved yet, and end all ranks at the step they agreed on.

    Raises:
        Interrupted, Preempted: after a signal.
        UsageError: if the run needs far more than the limit of --plan.
    """
    step = run.progress.step
    if code != UsageError.exit_code:
        run.journal.fault(step, "stop", "stopped by a signal")
    if run.saving.saved_step != step or not run.saving.finish():
        run.saving.save()
    message = agreed_excess(run) if code == UsageError.exit_code else ""
    run.close(None)
    _leave_world(run)
    if message:
        raise UsageError(
            f"{message}; stopped after step {step}, state saved: continue with --resume --run "
            f"{run.journal.folder.path}"
        )
    kind = Interrupted if code == Interrupted.exit_code else Preempted
    where = f"after step {step}, state saved" if step else "before the first step"
    raise kind(f"stopped {where}: continue with --resume --run {run.journal.folder.path}")


def open_session(config: TrainConfig, world: World, mark: Callable[[str], None]) -> Session:
    """Return the session of a run; loads only the framework of the run. Collective.

    Args:
        mark: called with the name of each phase at its end.

    Raises:
        UsageError, DataError: if the options or the data are invalid.
    """
    if config.framework == "tensorflow":
        if not world.has_mpi:
            raise needs_mpi("--framework tensorflow", world.size)
        # Hides TensorFlow's remarks on processors and plug-ins; errors come as exceptions.
        os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
        if find_spec("tensorflow") is None:
            raise UsageError(NO_TENSORFLOW)
        with output.without(output.TENSORFLOW_REMARKS):
            from hvdtrain.backends.tensorflow.session import open_session as open_keras_session
        mark("framework")
        session: Session = open_keras_session(config, world)
        mark("model")
        return session
    from hvdtrain.backends.pytorch import setup
    from hvdtrain.check.plan import CHECKS

    mark("framework")
    return setup.open_session(config, world, CHECKS, mark)


def begin(run: Run, clock: StartClock) -> None:
    """Print the settings of the run, and start its clock when all ranks are ready. Collective."""
    run.journal.followers.call("on_start", public(run.session.config), run.journal.folder.path)
    if run.progress.step:
        run.journal.followers.call("on_resume", run.progress.step)
    announce(run)
    # Other ranks wait while rank 0 opens the records: that must not count for their first step.
    run.activity.step(run.progress.step)  # tells the launcher that training has started
    clock.mark("run_folder")
    if run.heartbeat.meter is not None:
        run.heartbeat.meter.ask()
    with run.activity.doing("waiting for all ranks to start"):
        run.session.world.barrier()
    clock.mark("waiting")
    run.restart_clock()


# Always among the results; null where they are not measured.
MEASURED = ("val_loss", "val_accuracy", "test_loss", "test_accuracy")

NO_STEP = PendingStep(0, lambda: StepOutcome(0.0, False))  # of an agreement in an evaluation


def _until_stopped(run: Run, batches: Iterable[tuple[Feed, int]]) -> Iterator[tuple[Feed, int]]:
    """Yield the batches of an evaluation; after each, all ranks agree on whether to stop.

    Raises:
        Stopped: on all ranks after the same batch.
    """
    code = None
    for batch in batches:
        yield batch
        flags = Flags(
            interrupted=run.stop.interrupted,
            preempted=run.stop.preempted,
            written=run.saving.saver.written,
            failed=run.saving.saver.failed,
        )
        with run.activity.doing("agreeing with all ranks on an evaluation"):
            agreed, _ = run.control.post(NO_STEP, flags, Vitals(0.0, 0.0))
        if agreed is not None:
            run.saving.follow(agreed)
            code = agreed.stop
        if code is not None:
            break
    for agreed in run.drain():
        run.saving.follow(agreed)
        code = code or agreed.stop
    if code is not None:
        raise Stopped(code)


def evaluate(run: Run, split: str, rows: np.ndarray) -> dict[str, float]:
    """Return the means of the loss and its measures over `rows` of a split, by name.

    One rank counts each row, once.

    Raises:
        Stopped: on all ranks after the same batch, if any rank received a stop signal.
    """
    session = run.session
    slices = order.step_slices(len(rows), session.evaluation_images)
    sizes = [stop - start for start, stop in slices]
    row_requests = requests(rows, slices, partial(session.local_rows, is_training=False))
    with Loader(Feeder(session.splits[split]), row_requests) as loader:
        feeds = watched(loader, run.activity)
        local_sums = session.evaluate(_until_stopped(run, zip(feeds, sizes, strict=True)))
    with session.activity.doing("adding up an evaluation"):
        sums = np.sum(session.world.gather(local_sums), axis=0)
    names = ("loss", *session.measures)
    return {name: float(value) / len(rows) for name, value in zip(names, sums, strict=True)}


def end_epoch(run: Run, may_be_best: bool) -> None:
    """Evaluate after an epoch (or after the last step) if that is due; record it. Collective.

    Args:
        may_be_best: whether a checkpoint of this epoch is saved.

    Raises:
        Stopped: as `evaluate` does; nothing is recorded, so that a resumed run repeats all of it.
    """
    session, progress = run.session, run.progress
    counted = progress.epoch_samples  # none where every step was skipped
    others = [f"{split}_{name}" for split in ("val", "test") for name in session.measures]
    final: dict[str, Any] = dict.fromkeys((*MEASURED, *others))
    final["train_loss"] = progress.epoch_loss_sum / counted if counted else None
    if run.evaluation_due:
        final |= _measure(run)
    run.saving.saved_step = None
    progress.epoch_loss_sum, progress.epoch_samples = 0.0, 0
    _record(run, final)
    # Without a hold-out the training loss decides, never the test split.
    metric, sign = "train_loss", -1
    if len(session.held_rows):
        metric, sign = ("val_accuracy", 1) if "accuracy" in session.measures else ("val_loss", -1)
    best = progress.best
    is_candidate = may_be_best and final[metric] is not None
    if is_candidate and (best is None or sign * final[metric] > sign * best["value"]):
        progress.best = {"metric": metric, "value": final[metric], "step": progress.step}


def evaluate_end(run: Run) -> None:
    """Evaluate a run that had ended already, if that is due now and was not then. Collective."""
    final = run.progress.final
    if run.complete and run.evaluation_due and final.get("test_loss") is None:
        _record(run, final | _measure(run))


def _record(run: Run, final: dict[str, Any]) -> None:
    """Write the results of an epoch to the records and the console."""
    progress = run.progress
    progress.final = final
    run.clock.count()
    rate = progress.position / max(progress.train_seconds, 1e-9)
    run.journal.event(
        "epoch",
        step=progress.step,
        epoch=run.epoch,
        position=progress.position,
        seconds=progress.seconds,
        train_seconds=progress.train_seconds,
        images_per_second=rate,
        **final,
    )
    cells = {name.replace("_", " ").replace("accuracy", "acc"): final[name] for name in final}
    run.console.row(
        {**cells, "epoch": run.epoch, "loss": final["train_loss"], "images/s": rate}
        | {"seconds": progress.seconds}
    )


def _measure(run: Run) -> dict[str, float]:
    """Evaluate on the hold-out, if there is one, and on the test split. Collective."""
    session = run.session
    clock = Stopwatch(run.progress, "evaluation_seconds", session.device)
    held = evaluate(run, "train", session.held_rows) if len(session.held_rows) else {}
    tested = evaluate(run, "test", np.arange(session.index.splits["test"].count))
    clock.count()
    return {f"val_{name}": value for name, value in held.items()} | {
        f"test_{name}": value for name, value in tested.items()
    }
