"""The sums of a prepared model over the ranks, or its local steps.

Ranks sum gradients, running statistics and other buffers in every backward. With local steps they
update by their own gradients, and average their weights after a period.
"""

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from typing_extensions import override

from hvdtrain.engine.agreement import Note
from hvdtrain.engine.progress import stop_code
from hvdtrain.errors import UsageError
from hvdtrain.models.weights import COMPILED
from hvdtrain.options.requests import (
    NO_COMPRESSION,
    CompressRequest,
    Exact,
    Local,
    parse_sync_request,
)
from hvdtrain.plan.cut import Share
from hvdtrain.sync.collectives import Alone, Collectives, open_group
from hvdtrain.sync.compress import make_sums
from hvdtrain.sync.gradients import Gradients, ReplicatedGradients
from hvdtrain.sync.local import LocalMeetings, Meetings, SampleCount
from hvdtrain.sync.states import Kept, Replica, Shapes, States, fingerprint
from hvdtrain.torch.start import State

COMPARE_EVERY = 100  # backwards between comparisons of the ranks' weights
Key = tuple[nn.Module, str]
Group = tuple[torch.dtype, torch.device]


class Reduction(Kept):
    """The flat buckets of a model, one set per dtype and device, and its buffers.

    Args:
        groups: of the parameters; the first one also holds the statistics.
        others: the owner of each buffer that is not a statistic of a batch norm, by name.

    Attributes:
        changing: names of the buffers of `others` that forwards change on any rank.
        is_exact: whether all ranks hold the same weights after each step.
        meetings: of ranks with local steps; those that agree in every step have none.
    """

    is_exact = True

    def __init__(
        self,
        number: int,
        parameters: Mapping[str, nn.Parameter],
        others: Mapping[str, Key],
        state: State,
        compression: CompressRequest,
    ) -> None:
        self.number, self.state, self.compression = number, state, compression
        self.parameters, self.others = dict(parameters), dict(others)
        self.groups: list[Gradients] = []
        self.changing: set[str] = set()
        self.meetings = Meetings()
        self._seen = self._versions()

    def announce(self, share: Share) -> None:
        """Announce that the next backward completes the gradients."""
        for group in self.groups:
            group.announce(share)

    def start(self, share: Share) -> None:
        """Start the sums that have not started during backward."""
        for group in self.groups:
            group.start(share)

    def finish(self) -> None:
        """Return once every gradient is the sum over all ranks."""
        for group in self.groups:
            group.finish()
        if self.compression == NO_COMPRESSION:
            return
        # A GradScaler leaves out a step with infinities.
        if all(group.are_finite() for group in self.groups):
            for group in self.groups:
                group.after_update()

    def saved(self) -> dict[str, Tensor]:
        """Return what this rank's sums keep from step to step, by name."""
        return {name: value for group in self.groups for name, value in group.saved().items()}

    def wanted(self, shapes: Shapes) -> frozenset[str]:
        """Return what the sums read."""
        return frozenset[str]().union(*(group.wanted(shapes) for group in self.groups))

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Give the sums what was saved; each picks its parameters."""
        for group in self.groups:
            group.load(tensors)

    def add_group(
        self,
        parameters: Mapping[str, nn.Parameter],
        statistics: Mapping[str, Tensor],
        states: States,
        name: str,
    ) -> None:
        """Add parameters of one dtype and device."""
        place = self.state.place
        collectives: Collectives = Alone()
        if place.size > 1:
            first = next(iter((*parameters.values(), *statistics.values())))
            collectives = _among_all(self.state, first.device, name, "sums")
        is_whole = not parameters or any(v.dtype == torch.float16 for v in parameters.values())
        request = NO_COMPRESSION if is_whole else self.compression
        sums = make_sums(request, collectives)
        gradients = ReplicatedGradients(parameters, statistics, states, collectives, sums)
        self.groups.append(gradients)

    def fingerprint(self, backward: int) -> int:
        """Return a checksum of the weights where they are due to be compared, else 0."""
        if self.state.place.size == 1 or not (backward <= 2 or backward % COMPARE_EVERY == 0):
            return 0
        return fingerprint(self.parameters.values())

    def changed(self) -> list[str]:
        """Return the buffers that have changed and are not copied yet."""
        if self.state.place.size == 1:
            return []
        now = self._versions()
        names = [name for name in now if now[name] != self._seen[name]]
        return [name for name in names if name not in self.changing]

    def judge(self, notes: Sequence[Note], first: int) -> int | None:
        """Act on what the ranks report after a backward; return their exit code, if they stop.

        Args:
            first: the first rank with samples, whose buffers the others get.

        Raises:
            CheckFailed: on all ranks, if they hold different weights.
        """
        if len({note.fingerprint for note in notes}) > 1:
            self.state.raise_difference(f"comparing model {self.number}", self.parameters)
        if any(note.changed for note in notes):  # from now on they go with the sums
            action = f"copying buffers of model {self.number}"
            for names in self.state.agreement.gather(action, self.changed()):
                self.changing.update(names)
            self.put(self.state.agreement.broadcast(action, self.states(), first))
        return stop_code(
            any(note.interrupted for note in notes), any(note.preempted for note in notes)
        )

    def states(self) -> dict[str, Tensor]:
        """Return the current tensors of the changing buffers, in the same order on all ranks."""
        return {name: self._buffer(name) for name in sorted(self.changing)}

    def put(self, values: Mapping[str, Tensor]) -> None:
        """Store values of buffers, in new tensors: the old ones may be expanded."""
        for name, value in values.items():
            module, key = self.others[name]
            setattr(module, key, value.to(self._buffer(name).device))

    def _buffer(self, name: str) -> Tensor:
        module, key = self.others[name]
        value: Tensor = getattr(module, key)
        return value

    def _versions(self) -> dict[str, tuple[int, int]]:
        values = {name: self._buffer(name) for name in self.others}
        return {
            name: (id(value), 0 if value.is_inference() else value._version)
            for name, value in values.items()
        }


def reduction_of(
    number: int,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    state: State,
    compression: CompressRequest,
    period: int | None,
) -> Reduction:
    """Return the sums of a model; each gradient becomes a view into a bucket. Collective.

    Args:
        period: steps between meetings of ranks with local steps; None: exact gradients.
    """
    parameters = {name: value for name, value in model.named_parameters() if value.requires_grad}
    statistics = {
        f"{path}.{key}".lstrip("."): buffer
        for path, module in model.named_modules()
        if isinstance(module, _NormBase)
        for key, buffer in module.named_buffers(recurse=False)
    }
    known = {id(value) for value in statistics.values()}
    others = {
        f"{path}.{key}".lstrip("."): (module, key)
        for path, module in model.named_modules()
        for key, value in module.named_buffers(recurse=False)
        if id(value) not in known
    }
    if period is None or state.place.size == 1:
        reduction = Reduction(number, parameters, others, state, compression)
    else:
        reduction = LocalReduction(
            number, parameters, others, state, statistics, optimizer, period
        )
    groups: dict[Group, dict[str, Tensor]] = {
        (value.dtype, value.device): {} for value in parameters.values()
    }
    for name, value in statistics.items():
        groups.setdefault(_group_of(value, groups), {})[name] = value
    for place, (group, own_statistics) in enumerate(groups.items()):
        members = {
            name.replace(COMPILED, ""): value
            for name, value in parameters.items()
            if (value.dtype, value.device) == group
        }
        if not members:  # the first tensor gives the bucket its dtype
            dtype, device = group
            own_statistics = {"": torch.zeros(0, dtype=dtype, device=device), **own_statistics}
        states = States(reduction.states if place == 0 else dict, reduction.put)
        reduction.add_group(members, own_statistics, states, f"model{number}.{place}")
    return reduction


def _among_all(state: State, device: torch.device, name: str, purpose: str) -> Collectives:
    """Return the operations of all ranks on tensors of a device. Collective.

    The tensors of a loop may be on the CPU although its rank has a GPU, and NCCL takes none there.
    """
    everybody = tuple(range(state.place.size))
    return open_group(state.engine, everybody, state.world, device, name)(purpose)


def _group_of(value: Tensor, groups: Iterable[Group]) -> Group:
    """Return the group with which a statistic travels, in its precision: halves count to 2048."""
    least = torch.float64 if value.dtype == torch.float64 else torch.float32
    wide = [(dtype, value.device) for dtype in (least, torch.float64)]
    return next((group for group in groups if group in wide), wide[0])


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
    meetings: LocalMeetings

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
        super().__init__(number, parameters, others, state, NO_COMPRESSION)
        self.optimizer, self.trained = optimizer, SampleCount()
        self.share = Share(0.0, False)
        device = next(iter(parameters.values())).device
        collectives = _among_all(state, device, f"model{number}", "meetings")
        states = States(self.states, self._put)
        named = {name.replace(COMPILED, ""): value for name, value in parameters.items()}
        replica = Replica(named, statistics, states, optimizer, self._complete)
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
        nothing = States(dict, lambda _: None)
        self.groups.append(ReplicatedGradients(parameters, {}, nothing, Alone()))

    @override
    def start(self, share: Share) -> None:
        super().start(share)
        self.share = share
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
            for group in self.groups:
                assert isinstance(group, ReplicatedGradients)
                for bucket in group.buckets:
                    bucket.flat.fill_(torch.nan)
        return super().judge([note._replace(fingerprint=0) for note in notes], first)

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
        action = f"averaging model {self.number} in meeting {self.meetings.meetings}"
        for theirs in self.state.agreement.gather(action, forms):
            for name, entries in theirs.items():
                parameter = self.parameters[name]
                for key, (shape, dtype) in entries.items():
                    if key not in state[parameter]:
                        device = parameter.device if shape else torch.device("cpu")
                        zeros = torch.zeros(shape, dtype=dtype, device=device)
                        state[parameter][key] = zeros


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
