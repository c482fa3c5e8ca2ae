"""The training loop of a run, from the first step to the summary."""

import atexit
import math
import os
import time
from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from importlib.util import find_spec
from typing import Any

import psutil

from hvdtrain.checkpoint.replication import repair_records
from hvdtrain.config import TrainConfig
from hvdtrain.data import order
from hvdtrain.data.loader import Loader
from hvdtrain.errors import CheckFailed, Interrupted, Preempted, UsageError
from hvdtrain.health import failure
from hvdtrain.health.replicas import check_replicas, compare_fingerprints
from hvdtrain.health.stragglers import Stragglers, peers
from hvdtrain.host import quiet
from hvdtrain.host.activity import Activity
from hvdtrain.host.stop import StopRequest
from hvdtrain.options.configfile import differing, with_older_defaults
from hvdtrain.options.frameworks import REMARKS
from hvdtrain.training import saving
from hvdtrain.training.control import Agreed, Flags, Vitals, stop_code
from hvdtrain.training.evaluate import Stopped, end_epoch, evaluate_end
from hvdtrain.training.feed import Feed, Feeder, augmentation, requests, watched
from hvdtrain.training.precheck import NO_TENSORFLOW
from hvdtrain.training.rate import learning_rate
from hvdtrain.training.run import Run, open_run
from hvdtrain.training.session import Result, Session, StepRecord
from hvdtrain.training.steplog import StepLog
from hvdtrain.training.summary import summarise
from hvdtrain.world import World
from hvdtrain.world import start as start_world
from hvdtrain.world import stop as stop_world

TRACED_STEPS = 20


def train(config: TrainConfig, stop: StopRequest | None = None) -> dict[str, Any]:
    """Train on the ranks of the launcher that started this process, and return the summary.

    Args:
        config: the configuration of the run.
        stop: signals that are watched already; by default they are watched during this call.

    Raises:
        UsageError, DataError: for any mistake of the user; UsageError, too, if another start of
            the run takes the run folder over.
        CheckFailed: at a bad step that is not skipped, or if ranks end with different weights.
        Interrupted, Preempted: if the run received a stop signal; its state is saved.
    """
    config.check()
    with nullcontext(stop) if stop else StopRequest() as stop:
        world = start_world(config.allreduce, config.threads)
        ended: list[Activity] = []
        # Registered first, so that it is called after what the model's code registers.
        atexit.register(_note_the_end, ended)
        if world.size > 1:
            failure.end_all_on_exception()
        # First: with_older_defaults reads the version of a run from its records.
        repair_records(config, world)
        resolved: TrainConfig = world.broadcast(
            with_older_defaults(config) if world.rank == 0 else None
        )
        run = open_run(_open_session(resolved, world), stop)
        if resolved != config:
            older = differing(resolved, config)
            run.console.say(f"resumed with the settings of the older version: {older}")
        try:
            summary = _train(run)
        except BaseException:
            run.heartbeat.give_up()
            raise
        _leave_world(run)
        run.session.close()
        ended.append(run.activity)
    return summary


def _leave_world(run: Run) -> None:
    """Leave MPI and Horovod. Collective; a rank that hangs before this is reported first."""
    with run.activity.doing("leaving with all ranks", after_others=True):
        stop_world()


def _note_the_end(ended: Sequence[Activity]) -> None:
    """Note that this rank waits for MPI to end, which waits for all ranks."""
    for activity in ended:
        activity.note("ending with all ranks", after_others=True)


def _open_session(config: TrainConfig, world: World) -> Session:
    """Return the session of the run; loads only the framework of the run."""
    if config.framework == "tensorflow":
        # Hides TensorFlow's remarks on processors and plug-ins; errors come as exceptions.
        os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
        if find_spec("tensorflow") is None:
            raise UsageError(NO_TENSORFLOW)
        with quiet.without(REMARKS):
            from hvdtrain.backends.tensorflow import opening
        return opening.open_session(config, world)
    from hvdtrain.backends.pytorch import setup

    return setup.open_session(config, world)


def _train(run: Run) -> dict[str, Any]:
    """Run epochs, evaluations and checkpoints to the end of the run; return the summary."""
    _start(run)
    try:
        evaluate_end(run)
        while not run.complete:
            _train_and_evaluate(run)
    except Stopped as stopped:
        _leave(run, stopped.code)
    if not saving.finish(run):
        saving.save(run)
    run.count_seconds()
    if run.session.timeline is not None:
        run.session.timeline.write()
    with run.activity.doing("summing up the run"):
        summary = summarise(run)
    if run.session.config.memory_limit is not None:
        _check_memory(run, run.session.config.memory_limit, summary["peak_memory_bytes"])
    run.close(summary)
    run.console.say(
        f"trained {summary['samples']:,} samples in {summary['train_seconds']:.1f} s "
        f"({summary['images_per_second']:,.0f} images/s on {run.session.world.size} rank(s)); "
        f"{run.folder.path}"
    )
    return summary


def _start(run: Run) -> None:
    """Print the settings of the run, and start the clocks when all ranks are ready. Collective."""
    _announce(run)
    # Other ranks wait while rank 0 opens the records: that must not count for their first step.
    run.activity.step(run.progress.step)  # tells the launcher that training has started
    with run.activity.doing("waiting for all ranks to start"):
        run.session.world.barrier()
    run.startup_seconds = time.time() - psutil.Process().create_time()
    run.clock = time.perf_counter()


def _train_and_evaluate(run: Run) -> None:
    """Train an epoch, or the rest of it, evaluate, and save a checkpoint if one is due.

    Raises:
        Stopped: on all ranks, if any of them received a stop signal.
    """
    try:
        code = _asked_to_stop(run)
        if code is None and not run.epoch_end_due:
            code = _train_epoch(run)
        if code is None:
            check_replicas(run)
    except CheckFailed:  # on all ranks at the same step
        saving.finish(run)
        run.close(None)
        raise
    if code is not None:
        raise Stopped(code)
    due = saving.is_due_after_epoch(run)
    end_epoch(run, may_be_best=due)
    if due:
        saving.begin(run)


def _asked_to_stop(run: Run) -> int | None:
    """Return the exit code if any rank received a stop signal. Collective.

    Called before each epoch, since starting, evaluating and saving may have taken long.
    """
    with run.activity.doing("agreeing with all ranks on whether to start an epoch"):
        signals = run.session.world.gather((run.stop.interrupted, run.stop.preempted))
    interrupted, preempted = map(any, zip(*signals, strict=True))
    return stop_code(interrupted, preempted)


def _check_memory(run: Run, limit_gib: float, peaks: list[int]) -> None:
    """Report the rank with the highest peak memory, if that exceeds --memory-limit."""
    used = max(peaks) / 2**30
    if used > limit_gib:
        run.report(
            run.progress.step,
            "memory limit",
            f"rank {peaks.index(max(peaks))} used {used:.3f} GiB, more than --memory-limit "
            f"{limit_gib:g}: give a lower limit, more --microbatches or --recompute all, or "
            "remove the file of --profile if it is old",
        )


def _announce(run: Run) -> None:
    session, config = run.session, run.session.config
    run.console.say(
        f"{config.model}, {session.parameters:,} parameters, {config.precision}; "
        f"{session.world.size} rank(s) x {session.world.threads} thread(s) on "
        f"{session.device.kind}; {len(session.train_rows):,} training samples, "
        f"{math.ceil(len(session.train_rows) / config.batch_size):,} steps per epoch"
    )
    run.console.say_plan(session.plan)
    for line in session.remarks:
        run.console.say(line)
    if run.progress.step:
        run.console.say(f"resumed after step {run.progress.step:,}")
    run.console.header()
    if run.records is not None:
        plan_record = session.plan.to_json() | {"devices_a_rank": session.device.count}
        if session.predicted_seconds is not None:
            plan_record["predicted_seconds"] = session.predicted_seconds
        run.records.event("plan", step=run.progress.step, **plan_record)


def _train_epoch(run: Run) -> int | None:
    """Train to the end of the epoch; return the exit code if all ranks agreed to stop earlier."""
    length = len(run.session.train_rows)
    while True:
        code = _train_under_plan(run)
        if code is not None or run.trained or run.progress.position % length == 0:
            return code
        _change_plan(run)


def _change_plan(run: Run) -> None:
    """Migrate to the plan that rank 0 has chosen. Collective; no agreement is under way."""
    assert run.adapter is not None
    started = time.perf_counter()
    with run.activity.doing("changing the plan"):
        decision = run.adapter.change()
    _count_train_seconds(run, started)  # a migration has to pay for its own time
    run.stragglers = Stragglers(peers(run.session.plan, run.session.world.size))
    if decision is not None:
        _say_decision(run, decision)


def _say_decision(run: Run, decision: dict[str, Any]) -> None:
    """Record and print a decision on the plan; on rank 0."""
    assert run.records is not None
    plan = run.session.plan.to_json() | {"devices_a_rank": run.session.device.count}
    run.records.event("plan", step=run.progress.step, **plan, **decision)
    run.console.say(
        f"step {run.progress.step:,}: {decision['cause']}: "
        f"{decision['decision']}: {decision['reason']}"
    )
    if decision["decision"] == "change":
        run.console.say_plan(run.session.plan)


def _train_under_plan(run: Run) -> int | None:
    """Train to the end of the epoch or to a migration; return the exit code if all ranks stop."""
    session, progress, config = run.session, run.progress, run.session.config
    length = len(session.train_rows)
    if session.timeline is not None:
        session.timeline.align()
    epoch, offset = order.locate(progress.position, length)
    started = time.perf_counter()
    rows = order.training_order(session.index, session.train_rows, config.seed, epoch)
    last = config.total_samples(length) - epoch * length
    slices = [
        piece for piece in order.step_slices(length, config.batch_size, offset) if piece[0] < last
    ]
    log = StepLog(run, epoch, length)
    feeder = Feeder(session.splits["train"], augmentation(config, session.normalisation[0], epoch))
    row_requests = requests(rows, slices, partial(session.local_rows, is_training=True))
    loader = Loader(feeder, row_requests)
    epochs = math.ceil(config.total_samples(length) / length)
    code = None
    with run.console.bar(f"epoch {epoch + 1}/{epochs}", len(slices)), loader:
        feeds = watched(loader, run.activity)
        for (start, end), feed in zip(slices, feeds, strict=True):
            agreed = _step(run, feed, epoch, end - start, loader.last_wait)
            code = log.add(agreed) if agreed else None
            if code is None and (start, end) != slices[-1]:
                code = compare_fingerprints(run, log)
                if code is None and saving.is_due(run, agreed):
                    code = log.drain()
                    started = _count_train_seconds(run, started)
                    if code is None:
                        log.flush()
                        saving.begin(run)
                if code is None and _is_change_due(run, agreed):
                    break
            if code is not None:
                break
        code = log.drain() or code
    log.flush()
    _count_train_seconds(run, started)
    return code


def _is_change_due(run: Run, agreed: Agreed | None) -> bool:
    """Return whether all ranks migrate now; on rank 0 the adapter follows the step."""
    if run.adapter is None or agreed is None:
        return False
    config, length = run.session.config, len(run.session.train_rows)
    left = config.total_samples(length) - run.progress.position
    for decision in run.adapter.follow(agreed, left // config.batch_size):
        _say_decision(run, decision)
    profile = run.adapter.profile()
    if profile is not None and run.records is not None:
        run.records.event("profile", step=run.progress.step, **profile)
    return agreed.change


def _count_train_seconds(run: Run, since: float) -> float:
    """Add the time since `since` to the seconds of the run's steps; return the current time."""
    now = time.perf_counter()
    run.progress.train_seconds += now - since
    return now


def _step(run: Run, feed: Feed, epoch: int, batch_size: int, data_seconds: float) -> Agreed | None:
    """Run one step of all ranks; return the agreement on an earlier step."""
    session, progress, config = run.session, run.progress, run.session.config
    if run.heartbeat.is_replaced:
        run.owner.check()
    started = time.perf_counter()
    rate = learning_rate(config, len(session.train_rows), progress.position)
    progress.step += 1
    run.activity.step(progress.step)
    if run.injector is not None:
        run.injector.before(progress.step)
    result = session.train(feed, progress.position, batch_size, rate)
    progress.count(result)
    run.step_records.append(
        StepRecord(progress.step, progress.position, batch_size, feed, result.norm)
    )
    progress.position += batch_size
    if config.ledger and not result.is_bad:
        stem = f"{epoch + 1},{progress.step},{session.world.rank}"
        run.ledger += [f"{stem},{sample}\n" for sample in feed.ids.tolist()]
    if session.timeline is not None and progress.step - run.first_step == TRACED_STEPS:
        session.timeline.write()
    vitals = _vitals(run, result, time.perf_counter() - started, data_seconds)
    with run.activity.doing("agreeing with all ranks on the step before"):
        return run.control.post(result.read_loss, result.samples, _flags(run, result), vitals)


def _flags(run: Run, result: Result) -> Flags:
    stop, saver = run.stop, run.saver
    save = saving.is_wanted(run)
    changes = run.adapter is not None and run.adapter.wants_change
    return Flags(
        *(stop.interrupted, stop.preempted, save),
        *(saver.written, saver.failed, result.is_bad, changes),
    )


def _vitals(run: Run, result: Result, seconds: float, data_seconds: float) -> Vitals:
    """Return the vitals of this rank in a step.

    Args:
        seconds: duration of the step without the wait for its data, `data_seconds`.
    """
    whole = data_seconds + seconds
    return Vitals(
        seconds=whole,
        own_seconds=whole - result.waited_seconds,
        data_seconds=data_seconds,
        memory_bytes=run.heartbeat.memory_bytes,
        load=run.heartbeat.load,
    )


def _leave(run: Run, code: int) -> None:
    """Save the state if it is not saved yet, and end all ranks at the step they agreed on.

    Raises:
        Interrupted, Preempted: always.
    """
    step = run.progress.step
    run.record_fault(step, "stop", "stopped by a signal")
    if run.saved_step != step or not saving.finish(run):
        saving.save(run)
    run.close(None)
    _leave_world(run)
    kind = Interrupted if code == Interrupted.exit_code else Preempted
    where = f"after step {step}, state saved" if step else "before the first step"
    raise kind(f"stopped {where}: continue with --resume --run {run.folder.path}")
