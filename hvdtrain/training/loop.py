"""The training loop of a run, from the first step to the summary."""

import atexit
import math
import time
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from hvdtrain.checkpoint.replication import repair_records
from hvdtrain.config import TrainConfig
from hvdtrain.configfile import as_started
from hvdtrain.data import order
from hvdtrain.data.loader import Loader
from hvdtrain.engine.control import Agreed, Flags, Stopped, Vitals, stop_code
from hvdtrain.engine.feed import Feed, Request, requests, training_feeder, watched
from hvdtrain.engine.progress import Stopwatch, learning_rate
from hvdtrain.engine.session import StepInput
from hvdtrain.errors import CheckFailed, Interrupted, Preempted, UsageError
from hvdtrain.health import failure
from hvdtrain.health.stragglers import Stragglers, groups_of_equal_work
from hvdtrain.host.activity import Activity
from hvdtrain.host.process import StopRequest
from hvdtrain.options.givenmodel import SEAMS
from hvdtrain.training.callbacks import Callbacks
from hvdtrain.training.console import Console
from hvdtrain.training.evaluate import end_epoch, evaluate_end
from hvdtrain.training.memorylimit import agreed_excess, check_memory
from hvdtrain.training.metrics import summary_of_finished
from hvdtrain.training.opening import StartClock, begin, open_session
from hvdtrain.training.precheck import check_seams
from hvdtrain.training.run import Run, open_run
from hvdtrain.training.steplog import StepLog, check_replicas, compare_fingerprints
from hvdtrain.training.summary import TrainResult, expectation_line, summarise
from hvdtrain.world import start as start_world
from hvdtrain.world import stop as stop_world

TRACED_STEPS = 20


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
        world = start_world(config.allreduce, config.threads, config.bind)
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
    _train_under_plan(run)
    while not (run.trained or run.progress.position % length == 0):
        _change_plan(run)
        _train_under_plan(run)


def _change_plan(run: Run) -> None:
    """Migrate to the plan that rank 0 has chosen. Collective; no agreement is under way."""
    assert run.adapter is not None
    clock = Stopwatch(run.progress, "train_seconds", run.session.device)
    with run.activity.doing("changing the plan"):
        decision = run.adapter.change()
    clock.count()  # a migration has to pay for its own time
    run.stragglers = Stragglers(groups_of_equal_work(run.session.plan, run.session.world.size))
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
    return agreed.change


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
