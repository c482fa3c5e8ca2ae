"""`--replicate` in a run: which rank copies which checkpoint file, and the repair at start."""

import socket
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from hvdtrain.checkpoint import copies
from hvdtrain.config import TrainConfig
from hvdtrain.errors import DataError, UsageError
from hvdtrain.host import files
from hvdtrain.training.console import Console
from hvdtrain.training.metrics import RunFolder
from hvdtrain.world import World


@dataclass
class Replication:
    """The second copies that this rank keeps.

    Attributes:
        home: the folder of the copies.
        owner: the rank whose checkpoint files are copied.
        is_new: whether no copy was made since the run was opened.
        before: the identity of the checkpoint that the pending one will replace.
    """

    world: World
    folder: RunFolder
    home: Path
    owner: int
    is_new: bool = True
    before: copies.Identity | None = None

    def expect(self, name: str) -> None:
        """Note that the checkpoint `name` is about to be written."""
        self.before = copies.identity(self.folder.checkpoints.resolve() / name)

    def keep(self, name: str) -> None:
        """Copy the owner's file of that checkpoint once it is committed.

        One rank per host also copies the records of the run.
        """
        checkpoint = self.folder.checkpoints.resolve() / name
        try:
            written = copies.wait_for(checkpoint, self.before).progress["metrics_bytes"]
            if self.world.local_rank == 0:  # records first: the checkpoint refers to them
                config = self.folder.config
                copies.copy_record(config, config.stat().st_size, self.home, is_new=True)
                copies.copy_record(self.folder.metrics, written, self.home, self.is_new)
            copies.copy_part(checkpoint, self.owner, self.home)
            self.is_new = False
        except (DataError, OSError) as error:  # the run continues: the checkpoint itself is saved
            where = f"rank {self.world.rank} on {socket.gethostname()}"
            print(f"hvdtrain: {where} has no second copy of {name}: {error}", file=sys.stderr)


def repair_records(config: TrainConfig, world: World) -> None:
    """Restore records that the run folder lost, from the rank that has most. Collective.

    Raises:
        DataError: if they cannot be written.
        UsageError: if another user could have changed the copies.
    """
    if not (config.replicate and config.resume and config.run):
        return
    run = Path(config.run)
    home = copies.home(config.replicate, run, world.rank)
    fault = files.ownership_problem(home, follow=False) if home.exists() else None
    if fault := next(filter(None, world.gather(fault)), None):
        raise UsageError(f"--replicate: {fault}")
    sizes = world.gather(copies.records_bytes(home))
    if world.rank == int(np.argmax(sizes)):
        copies.repair_records(run, home)
    world.barrier()


def refuse_to_start_over(config: TrainConfig, folder: RunFolder, world: World) -> None:
    """Refuse a new start that would remove the copies of a run whose folder is lost. Collective.

    Raises:
        UsageError: if a rank's folder of --replicate holds checkpoints.
    """
    home = copies.home(config.replicate, folder.path, world.rank) if config.replicate else None
    held = world.gather(
        str(home) if home is not None and home.is_dir() and copies.names(home) else ""
    )
    if left := next(filter(None, held), None):
        raise UsageError(
            f"--resume auto: {left} holds copies of checkpoints of a run whose config.yaml is "
            f"missing: restore {folder.config}, or remove the copies to start a new run"
        )


def open_replication(
    config: TrainConfig, folder: RunFolder, world: World, console: Console
) -> Replication | None:
    """Return the replication that `--replicate` requests, and make its folder. Collective.

    Raises:
        UsageError: if the folder cannot be made, or another user could change the copies.
    """
    if not config.replicate:
        return None
    home = copies.home(config.replicate, folder.path, world.rank)
    try:
        files.make_own_folder(home, "--replicate")
        if not config.resume:
            copies.clear(home)
    except OSError as error:
        raise UsageError(f"--replicate: {home} cannot be made: {error.strerror}") from None
    hosts = world.gather(socket.gethostname())
    owners = copies.owners(hosts)
    if any(hosts[rank] == hosts[owner] for rank, owner in enumerate(owners)):
        console.say("note: --replicate keeps some copies on the same host as the original")
    return Replication(world, folder, home, owners[world.rank])
