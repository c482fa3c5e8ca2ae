"""Local steps of a prepared model: ranks train apart and average their weights after a period."""

from collections.abc import Mapping, Sequence
from functools import partial

import torch
from torch import Tensor, nn
from typing_extensions import override

from hvdtrain.errors import UsageError
from hvdtrain.options.requests import CompressRequest, Exact, Local, parse_sync_request
from hvdtrain.plan.cut import Share
from hvdtrain.sync.collectives import Alone, collectives_of
from hvdtrain.sync.gradients import ExactSums, ReplicatedGradients
from hvdtrain.sync.local import LocalMeetings, SampleCount
from hvdtrain.sync.states import Replica, States
from hvdtrain.torch.agreement import Action, Note
from hvdtrain.torch.reduction import (
    COMPILED,
    Key,
    MadeBy,
    Reduction,
    WeightedSums,
    statistics_of,
)
from hvdtrain.torch.state import State


class LocalReduction(Reduction):
    """Gradients of a rank's own samples, and the meetings of all ranks.

    The state of the optimizer is averaged, too, so that a checkpoint of rank 0 is complete. A rank
    without samples has gradients of zero, since a GradScaler needs some.

    Args:
        statistics: running statistics of batch norms, by name.
        optimizer: of the parameters.
        period: steps from one meeting to the next.
    """

    is_exact = False

    def __init__(
        self,
        number: int,
        parameters: Mapping[str, nn.Parameter],
        others: Mapping[str, Key],
        state: State,
        statistics: Mapping[str, Tensor],
        optimizer: torch.optim.Optimizer,
        period: int,
    ) -> None:
        super().__init__(number, parameters, others, state)
        self.optimizer, self.period, self.trained = optimizer, period, SampleCount()
        self.share = Share(0.0, False)
        everybody = tuple(range(state.place.size))
        collectives = collectives_of(
            state.engine, everybody, state.place.rank, f"model{number}.meetings"
        )
        states = States(self.states, self._put)
        replica = Replica(_named(parameters), statistics, states, optimizer, self._complete)
        request = Local(period, averages_optimizer=True)
        self.meetings = LocalMeetings(replica, collectives, self.trained, request)
        self.statistics = statistics

    @override
    def add_group(
        self,
        parameters: Mapping[str, nn.Parameter],
        statistics: Mapping[str, Tensor],
        states: States,
        name: str,
    ) -> None:
        if not parameters:
            return
        alone, nothing = Alone(), States(dict, lambda _: None)
        sums = WeightedSums(ExactSums(alone), self)
        self.groups.append(ReplicatedGradients(parameters, {}, nothing, alone, sums))

    @override
    def start(self, share: Share) -> None:
        super().start(share)
        self.share = share
        self.meetings.before_step(0)
        self.trained.samples += share.samples

    @override
    @torch.no_grad()
    def finish(self) -> None:
        """Scale the gradients, which are weighted by the share, to the mean over its samples."""
        super().finish()
        for group in self.groups:
            assert isinstance(group, ReplicatedGradients)
            for bucket in group.buckets if self.share.samples else ():
                bucket.flat.mul_(1 / self.share.weight)

    @override
    def fingerprint(self, backward: int) -> int:
        """Return whether gradients are not finite: ranks hold different weights anyway."""
        return int(not all(group.are_finite() for group in self.groups))

    @override
    def judge(self, notes: Sequence[Note], first: int) -> int | None:
        """Act on the notes; let all ranks see that gradients of one are not finite.

        A GradScaler then leaves out the same steps on all of them.
        """
        if any(note.fingerprint for note in notes):
            for parameter in self.parameters.values():
                if parameter.grad is not None:
                    parameter.grad.fill_(torch.nan)
            for group in self.groups:
                assert isinstance(group, ReplicatedGradients)
                for bucket in group.buckets:
                    bucket.flat.fill_(torch.nan)
        return super().judge([note._replace(fingerprint=0) for note in notes], first)

    @override
    def after_step(self, step: int) -> None:
        self.meetings.count_step()
        if step % self.period == 0:
            self.meet()

    @override
    def meet(self) -> None:
        """Average weights, optimizer and statistics, if there was a step since the last time."""
        if self.meetings.steps:
            self.meetings.meet()

    @override
    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Start a period: all ranks have loaded the same weights."""
        self.meetings.start_period()

    def _put(self, values: Mapping[str, Tensor]) -> None:
        """Store values of counters in place, and those of other buffers in new tensors."""
        for name, value in values.items():
            if name in self.statistics:
                self.statistics[name].copy_(value)
        self.put({name: value for name, value in values.items() if name in self.others})

    def _complete(self) -> None:
        """Create the optimizer's state where only other ranks have it, as zeros. Collective."""
        state = self.optimizer.state
        forms = {
            name: {
                key: (tuple(value.shape), value.dtype)
                for key, value in state.get(parameter, {}).items()
                if isinstance(value, Tensor)
            }
            for name, parameter in self.parameters.items()
        }
        note = Note(Action.MEETING, self.number, self.meetings.meetings)
        for theirs in self.state.agreement.gather(note, forms):
            for name, entries in theirs.items():
                parameter = self.parameters[name]
                for key, (shape, dtype) in entries.items():
                    if key not in state[parameter]:
                        device = parameter.device if shape else torch.device("cpu")
                        zeros = torch.zeros(shape, dtype=dtype, device=device)
                        state[parameter][key] = zeros


def _named(parameters: Mapping[str, nn.Parameter]) -> dict[str, nn.Parameter]:
    """Return parameters by their names in a checkpoint."""
    return {name.replace(COMPILED, ""): value for name, value in parameters.items()}


def period_of(sync: str, optimizers: Sequence[torch.optim.Optimizer]) -> int | None:
    """Return the steps between meetings that a value of `sync` requests; None if it is exact.

    Raises:
        UsageError: if `prepare` does not support it.
    """
    request = parse_sync_request(sync)
    if isinstance(request, Exact):
        return None
    if not isinstance(request, Local) or request != Local(request.period):
        raise UsageError(f"prepare does not support sync={sync!r}: use 'exact' or 'local:H'")
    if len(optimizers) > 1:
        raise UsageError(f"sync={sync!r} supports one optimizer: prepare each model with its own")
    return request.period


def reduction_kind(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    period: int | None,
    compression: CompressRequest,
    ranks: int,
) -> MadeBy:
    """Return what makes the sums of a model: those of every step if `period` is None."""
    if period is None:
        return partial(Reduction, compression=compression)
    if ranks == 1:
        return Reduction
    return partial(
        LocalReduction,
        statistics=statistics_of(model),
        optimizer=optimizer,
        period=period,
    )
