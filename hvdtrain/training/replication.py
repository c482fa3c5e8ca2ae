"""`--replicate` in a run: which rank copies what, when, and what comes back at the start."""

import socket
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from hvdtrain import files
from hvdtrain.config import TrainConfig
from hvdtrain.errors import DataError, UsageError
from hvdtrain.training.checkpoint import copies
from hvdtrain.training.console import Console
from hvdtrain.training.metrics import RunFolder
from hvdtrain.world import World


@dataclass
class Replication:
    """Where this rank keeps second copies, and of whose parts.

    Attributes:
        is_new: whether none was made since the run was opened.
        before: what the checkpoint under way is to replace.
    """

    here: World
    folder: RunFolder
    home: Path
    owner: int
    is_new: bool = True
    before: copies.Identity | None = None

    def expect(self, name: str) -> None:
        """The checkpoint `name` is about to be made."""
        self.before = copies.identity(self.folder.checkpoints.resolve() / name)

    def keep(self, name: str) -> None:
        """Copy a rank's part of that checkpoint once it is there; one rank a host, the records."""
        checkpoint = self.folder.checkpoints.resolve() / name
        try:
            written = copies.wait_for(checkpoint, self.before).progress["metrics_bytes"]
            if self.here.local_rank == 0:  # first: what the checkpoint counts on
                config = self.folder.config
                copies.copy_record(config, config.stat().st_size, self.home, is_new=True)
                copies.copy_record(self.folder.metrics, written, self.home, self.is_new)
            copies.copy_part(checkpoint, self.owner, self.home)
            self.is_new = False
        except (DataError, OSError) as error:  # the run goes on: the first copy is on the disk
            where = f"rank {self.here.rank} on {socket.gethostname()}"
            print(f"hvdtrain: {where} keeps no second copy of {name}: {error}", file=sys.stderr)


def mend_records(config: TrainConfig, here: World) -> None:
    """Give the run folder back the records that it lost, from the rank that has most. Collective.

    Raises:
        DataError: if they cannot be written.
        UsageError: if another user could have changed the copies.
    """
    if not (config.replicate and config.resume and config.run):
        return
    run = Path(config.run)
    home = copies.home(config.replicate, run, here.rank)
    fault = files.fault_of_owner(home, follow=False) if home.exists() else None
    if fault := next(filter(None, here.gather(fault)), None):
        raise UsageError(f"--replicate: {fault}")
    sizes = here.gather(copies.records_bytes(home))
    if here.rank == int(np.argmax(sizes)):
        copies.mend_records(run, home)
    here.barrier()


def refuse_to_start_over(config: TrainConfig, folder: RunFolder, here: World) -> None:
    """Refuse a fresh start that would remove the copies of a run whose folder is lost. Collective.

    Raises:
        UsageError: if a rank's folder of --replicate holds checkpoints.
    """
    home = copies.home(config.replicate, folder.path, here.rank) if config.replicate else None
    held = here.gather(
        str(home) if home is not None and home.is_dir() and copies.names(home) else ""
    )
    if left := next(filter(None, held), None):
        raise UsageError(
            f"--resume auto: {left} holds copies of checkpoints of a run, but no config.yaml of "
            f"it is left: restore {folder.config}, or remove the copies to start anew"
        )


def open_replication(
    config: TrainConfig, folder: RunFolder, here: World, console: Console
) -> Replication | None:
    """What `--replicate` asks for, with a folder that is there. Collective.

    Raises:
        UsageError: if it cannot be made, or another user could change the copies.
    """
    if not config.replicate:
        return None
    home = copies.home(config.replicate, folder.path, here.rank)
    try:
        files.make_own_folder(home, "--replicate")
        if not config.resume:
            copies.clear(home)
    except OSError as error:
        raise UsageError(f"--replicate: {home} cannot be made: {error.strerror}") from None
    hosts = here.gather(socket.gethostname())
    owners = copies.owners(hosts)
    if any(hosts[rank] == hosts[owner] for rank, owner in enumerate(owners)):
        console.say("note: --replicate keeps some copies on the host of their first copy")
    return Replication(here, folder, home, owners[here.rank])
