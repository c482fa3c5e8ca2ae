"""What `hvdtrain jobs` is asked, beside the options of `train`."""

import re
from dataclasses import dataclass, field
from typing import Literal

from hvdtrain.config import TrainConfig, about
from hvdtrain.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class JobOptions:
    """What a job asks the cluster for; the number of ranks is that of the run."""

    cluster: Literal["slurm", "local"] = field(
        default="slurm", metadata=about("slurm, or local: the same job on this machine")
    )
    site: str | None = field(
        default=None,
        metadata=about("YAML file with what your site wants (slurm/sites has an example)"),
    )
    nodes: int = field(default=1, metadata=about("nodes; --ranks are spread over them evenly"))
    cpus_per_rank: int = field(default=1, metadata=about("CPUs of each rank"))
    gpus_per_node: int = field(default=0, metadata=about("GPUs of each node, one a rank"))
    time: str = field(default="1:00:00", metadata=about("limit as minutes, H:MM:SS or D-HH:MM:SS"))
    partition: str | None = field(default=None, metadata=about("default: that of the site"))
    account: str | None = field(default=None, metadata=about("default: that of the site"))
    chain: int = field(
        default=1,
        metadata=about(
            "jobs, each of which goes on where the one before ended without being done"
        ),
    )
    dry_run: bool = field(default=False, metadata=about("print the script, and submit nothing"))

    def minutes(self) -> int:
        """The time limit in whole minutes.

        Raises:
            UsageError: if it is none.
        """
        found = re.fullmatch(r"(?:(\d+)-)?(\d+):(\d\d):(\d\d)|(\d+)", self.time)
        if found is None:
            raise UsageError(
                f"--time {self.time!r} is not understood: give minutes, H:MM:SS or D-HH:MM:SS"
            )
        days, hours, minutes, seconds, alone = (int(part or 0) for part in found.groups())
        total = (days * 24 + hours) * 60 + minutes + -(-seconds // 60) + alone
        if total == 0:
            raise UsageError(f"--time {self.time} is no time")
        return total

    def ranks_per_node(self, training: TrainConfig) -> int:
        """How many ranks each node gets.

        Raises:
            UsageError: if they cannot be spread evenly, or fit no GPUs.
        """
        ranks = training.ranks or 1
        for name in ("nodes", "cpus_per_rank", "chain"):
            if getattr(self, name) < 1:
                raise UsageError(f"--{name.replace('_', '-')} must be above 0")
        if ranks % self.nodes:
            raise UsageError(f"--ranks {ranks} cannot be spread evenly over --nodes {self.nodes}")
        each = ranks // self.nodes
        if self.gpus_per_node and self.gpus_per_node != each:
            raise UsageError(
                f"{each} ranks on a node of --gpus-per-node {self.gpus_per_node}: "
                "a rank has one GPU, so make them equal"
            )
        if self.cluster == "local" and self.nodes > 1:
            raise UsageError("--cluster local is one machine: leave --nodes out")
        return each
