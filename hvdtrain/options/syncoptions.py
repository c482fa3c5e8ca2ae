"""The options that say how the replicas of a stage agree."""

from dataclasses import dataclass
from typing import Literal

from hvdtrain.errors import UsageError
from hvdtrain.options.fields import Group, Rule, option
from hvdtrain.options.syncrequest import (
    CompressRequest,
    Server,
    SyncRequest,
    no_worker,
    parse_compress_request,
    parse_sync_request,
)

Library = Literal["horovod", "mpi"]
Algorithm = Literal["auto", "ring", "recursive-doubling", "rabenseifner", "tree", "hierarchical"]


@dataclass(frozen=True, kw_only=True)
class SyncOptions:
    """The agreement of the replicas of a stage: when, on what, and over what."""

    sync: str = option(
        "exact",
        "exact: sum gradients in every step; local:H: train alone and average weights every H "
        "steps (local:H@EPOCH: after that many exact epochs; local:H,average-optimizer: the "
        "optimizer's state, too); diloco:H: as local, with an outer optimizer "
        "(diloco:H,lr=0.7,momentum=0.9); elastic:H: drawn to a common centre every H steps "
        "(elastic:H,rate=X: by that share of the way instead of 0.9 / replicas); server: the last "
        "rank (server,servers=N: the last N) holds the weights, updates them with the sum of all "
        "gradients and does not train; server:stale=S: each rank's gradients when they arrive, up "
        "to S steps ahead of the slowest rank; server:async: without waiting for any",
        Group.SYNC,
        Rule.ONE_LINE | Rule.TORCH_ONLY,
        "METHOD",
    )
    compress: str = option(
        "none",
        "how gradients travel under --sync exact: none (as they are), fp16, bf16, topk:RATIO (the "
        "largest values) or powersgd:RANK (low-rank matrices), each after 100 exact sums "
        "(topk:0.01,after=20: after 20); what is left out is added to the next gradients",
        Group.SYNC,
        Rule.ONE_LINE | Rule.TORCH_ONLY,
        "METHOD",
    )
    shard_optimizer: bool = option(
        False,
        "divide the optimizer's state among the replicas of a stage (ZeRO stage 1)",
        Group.SYNC,
        Rule.ON_RESUME | Rule.TORCH_ONLY,
    )
    reduce_with: Library | None = option(  # noqa: RUF009
        None,
        "library that sums gradients",
        Group.SYNC,
        Rule.ON_RESUME | Rule.TORCH_ONLY,
        shown_default="horovod, or mpi where Horovod is not installed",
    )
    allreduce: Algorithm = option(  # noqa: RUF009
        "auto",
        "algorithm of the MPI library's all-reduce; auto: let the library choose; hierarchical "
        "needs --reduce-with horovod",
        Group.SYNC,
        Rule.ON_RESUME,
    )

    @property
    def sync_request(self) -> SyncRequest:
        """Return the parsed value of --sync."""
        return parse_sync_request(self.sync)

    @property
    def steps_ahead(self) -> int:
        """Return how many steps a rank may be ahead of the slowest one inside an epoch."""
        request = self.sync_request
        return request.steps_ahead if isinstance(request, Server) else 1

    def workers_of(self, ranks: int) -> int:
        """Return how many of a number of ranks train; the others, the last ones, are servers.

        Raises:
            UsageError: if none is left to train.
        """
        request = self.sync_request
        if not isinstance(request, Server):
            return ranks
        if ranks <= request.servers:
            raise UsageError(no_worker(self.sync, request.servers, ranks))
        return ranks - request.servers

    @property
    def compress_request(self) -> CompressRequest:
        """Return the parsed value of --compress."""
        return parse_compress_request(self.compress)
