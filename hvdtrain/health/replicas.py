"""Checks that the replicas of each stage hold the same weights: by checksums, then by SHA-256."""

from hvdtrain.errors import CheckFailed
from hvdtrain.training.run import Run
from hvdtrain.training.steplog import StepLog
from hvdtrain.training.summary import weights_sha256

CHECK_EVERY = 100  # steps from one comparison inside an epoch to the next


def compare_fingerprints(run: Run, log: StepLog) -> int | None:
    """Compare the replicas of each stage after every 100th step. Collective; inside an epoch.

    Only if they differ, the pending agreements are read and all weights are hashed.

    Returns:
        The exit code if the ranks agreed to stop meanwhile.

    Raises:
        CheckFailed: on all ranks, if any differ.
    """
    session = run.session
    # All ranks are at the same step: each has sent the control vector of it.
    if run.progress.step % CHECK_EVERY or not _has_replicas(run):
        return None
    with run.activity.doing("comparing the replicas"):
        fingerprints = session.world.gather(session.state.fingerprints())
    if all(
        len({fingerprints[rank][number] for rank in stage.ranks}) == 1
        for number, stage in enumerate(session.plan.stages)
    ):
        return None
    code = log.drain()
    log.flush()
    check_replicas(run)
    return code


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
        run.record_fault(run.progress.step, "replicas differ", str(error))
        raise


def _has_replicas(run: Run) -> bool:
    return any(len(stage.ranks) > 1 for stage in run.session.plan.stages)
