"""DiLoCo: replicas train apart, and an outer optimizer follows the average of their changes.

Douillard et al., "DiLoCo: Distributed Low-Communication Training of Language Models", arXiv
2311.08105. The outer gradient is the start of the period minus the average of the replicas; SGD
with Nesterov momentum updates the start with it, and all replicas continue from there.

Douillard et al., "Streaming DiLoCo with overlapping communication", arXiv 2501.18512: fragments of
the model meet in turn, and a transfer may overlap with the next steps. What arrives then is mixed
with what the replica has trained meanwhile, one half each, as in the paper.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from hvdtrain.plan.traffic import fragment_numbers
from hvdtrain.sync.apart import Apart
from hvdtrain.sync.average import Agreed
from hvdtrain.sync.collectives import Collectives
from hvdtrain.sync.local import Trained
from hvdtrain.sync.replica import Replica
from hvdtrain.sync.saved import Shapes

MIXING = 0.5  # share of a replica's own weights when a transfer has overlapped with steps


@dataclass(frozen=True)
class Outer:
    """The outer optimizer, and when fragments meet.

    Attributes:
        rate: learning rate.
        momentum: Nesterov's, by PyTorch's formula.
        fragments: number of fragments, at most the period.
        overlap: steps from the start of a transfer to its use, fewer than the period.
    """

    rate: float = 0.7
    momentum: float = 0.9
    fragments: int = 1
    overlap: int = 0


@dataclass
class Fragment:
    """Parameters that meet together.

    Attributes:
        number: in the order of the model, from 0.
        offset: its meetings are after the steps that leave this rest when divided by the period.
        parameters: by name.
        buffers: running statistics that are averaged with them; only of the last fragment.
        start: the weights after its last outer step, the same on all replicas; set before the
            first step.
        momentum: of the outer optimizer.
        steps: since the start of its last transfer.
        samples_before: this replica's count at that time.
        travelling: the transfer in flight, None if there is none.
        arrived: its result, if a checkpoint had to wait for it.
    """

    number: int
    offset: int
    parameters: dict[str, nn.Parameter]
    buffers: dict[str, Tensor]
    start: list[Tensor] = field(default_factory=list)
    momentum: list[Tensor] = field(default_factory=list)
    steps: int = 0
    samples_before: int = 0
    travelling: Any = None
    arrived: Agreed | None = None

    @property
    def is_in_flight(self) -> bool:
        """Return whether a transfer has started whose result is not used yet."""
        return self.travelling is not None or self.arrived is not None

    @property
    def names(self) -> list[str]:
        """Names of everything that travels, in that order."""
        return [*self.parameters, *self.buffers]

    @property
    def anchor(self) -> str:
        """The name of its first tensor."""
        return next(iter(self.names), "")


class DiLoCoMeetings(Apart):
    """Meetings with an outer optimizer.

    `meet` ends all periods early: transfers in flight are used, and every fragment that has been
    trained since then makes an outer step. Running statistics and other buffers travel with the
    last fragment.
    """

    def __init__(
        self,
        replica: Replica,
        collectives: Collectives,
        trained: Trained,
        period: int,
        outer: Outer,
    ) -> None:
        super().__init__(replica, collectives, trained, period)
        self.outer = outer
        self.fragments = _fragments(replica, period, outer.fragments)

    @override
    def before_step(self, epoch: int) -> None:
        """Note the weights from which all replicas start, before the first step."""
        for fragment in self.fragments:
            if not fragment.start:
                parameters = [value.detach() for value in fragment.parameters.values()]
                fragment.start = [value.clone() for value in parameters]
                fragment.momentum = [torch.zeros_like(value) for value in parameters]

    @override
    def after_step(self, step: int) -> None:
        self.count_step()
        for fragment in self.fragments:
            fragment.steps += 1
            since = (step - fragment.offset) % self.period
            if fragment.is_in_flight and since == self.outer.overlap:
                self._use(fragment, MIXING)
            if since == 0:
                self._send(fragment)
                if self.outer.overlap == 0:
                    self._use(fragment, 0.0)
        if len(self.fragments) == 1 and self.fragments[0].steps == 0 and not self.outer.overlap:
            self._note_agreement()

    @override
    def exchange(self) -> None:
        """Use transfers in flight, and make an outer step of all that was trained since."""
        for fragment in self.fragments:
            if fragment.is_in_flight:
                # Without steps since its start, the replicas' own weights have nothing to add.
                self._use(fragment, MIXING if fragment.steps else 0.0)
        due = [fragment for fragment in self.fragments if fragment.steps]
        for fragment in due:
            self._send(fragment)
        for fragment in due:
            self._use(fragment, 0.0)
        self._note_agreement()

    def _note_agreement(self) -> None:
        self.differ = False
        self.steps, self.samples_before = 0, self.trained.samples

    @torch.no_grad()
    def _send(self, fragment: Fragment) -> None:
        """Start to average the change of a fragment since its last outer step."""
        changes = [
            start - parameter
            for start, parameter in zip(fragment.start, fragment.parameters.values(), strict=True)
        ]
        samples = self.trained.samples - fragment.samples_before
        buffers = list(fragment.buffers.values())
        name = f"fragment{fragment.number}"
        fragment.travelling = self.averager.start(name, [*changes, *buffers], samples)
        fragment.steps, fragment.samples_before = 0, self.trained.samples
        self.meetings += 1

    @torch.no_grad()
    def _use(self, fragment: Fragment, mixing: float) -> None:
        """Make an outer step with the average, and mix the replica's own weights in.

        Args:
            mixing: share of the replica's own weights.
        """
        agreed, count = self._received(fragment), len(fragment.start)
        fragment.travelling = fragment.arrived = None
        self._make_outer_step(fragment, agreed.averages[:count])
        targets = [*fragment.start, *agreed.averages[count:]]
        held = [*fragment.parameters.values(), *fragment.buffers.values()]
        for value, target in zip(held, targets, strict=True):
            if mixing:
                value.mul_(mixing).add_(target, alpha=1 - mixing)
            else:
                value.copy_(target)
        if fragment is self.fragments[-1]:
            self.copy_states(agreed.first)

    def _make_outer_step(self, fragment: Fragment, gradients: Sequence[Tensor]) -> None:
        norms = [torch.linalg.vector_norm(gradient) for gradient in gradients]
        self.drift = float(torch.stack(norms).square().sum().sqrt()) if norms else 0.0
        for start, momentum, gradient in zip(
            fragment.start, fragment.momentum, gradients, strict=True
        ):
            momentum.mul_(self.outer.momentum).add_(gradient)
            change = gradient.add(momentum, alpha=self.outer.momentum)
            start.sub_(change, alpha=self.outer.rate)

    def _received(self, fragment: Fragment) -> Agreed:
        if fragment.arrived is None:
            fragment.arrived = self.averager.finish(fragment.travelling)
        return fragment.arrived

    @override
    def saved(self) -> dict[str, Tensor]:
        """Return this replica's state; the first one adds what is the same on all."""
        # Every replica waits for transfers in flight.
        arrived = {
            fragment.number: self._received(fragment) if fragment.is_in_flight else None
            for fragment in self.fragments
        }
        saved, place = super().saved(), self.collectives.place
        for fragment in self.fragments:
            if self.has_local_state and fragment.anchor:
                counts = [self.trained.samples - fragment.samples_before, fragment.steps]
                saved[f"replica/{place}/fragment/{fragment.anchor}"] = torch.tensor(counts)
            if place == 0 and fragment.start:
                saved |= _shared(fragment, arrived[fragment.number])
        return saved

    @override
    def wanted(self, shapes: Shapes) -> frozenset[str]:
        """Return the replica's state, and the state of the outer optimizer."""
        wanted = set(super().wanted(shapes))
        for fragment in self.fragments:
            for kind in ("start", "momentum"):
                wanted |= {f"outer/{kind}/{name}" for name in fragment.parameters}
            arriving = {f"outer/arriving/{name}" for name in fragment.names}
            weights = f"outer/weights/{fragment.anchor}"
            if f"replica/{self.collectives.place}/fragment/{fragment.anchor}" in wanted:
                wanted |= arriving | {weights}
        return frozenset(wanted & shapes.keys())

    @override
    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Continue as the replica that saved this state, with the same outer optimizer."""
        prefix = f"replica/{self.collectives.place}/fragment/"
        for fragment in self.fragments:
            samples, fragment.steps = tensors.get(
                f"{prefix}{fragment.anchor}", torch.zeros(2, dtype=torch.int64)
            ).tolist()
            fragment.samples_before = self.trained.samples - samples
            fragment.start = _loaded(tensors, "start", fragment.parameters)
            fragment.momentum = _loaded(tensors, "momentum", fragment.parameters)
            fragment.travelling = fragment.arrived = None
            weights = tensors.get(f"outer/weights/{fragment.anchor}")
            if weights is not None:
                arriving = _loaded(tensors, "arriving", fragment.parameters | fragment.buffers)
                fragment.arrived = Agreed(arriving, [], weights.clone())
        super().load({k: v for k, v in tensors.items() if not k.startswith(("outer/", prefix))})


def _fragments(replica: Replica, period: int, count: int) -> list[Fragment]:
    """Return fragments of about equally many bytes, in the order of the model."""
    numbers = fragment_numbers([value.nbytes for value in replica.parameters.values()], count)
    groups: dict[int, dict[str, nn.Parameter]] = {}
    for number, (name, parameter) in zip(numbers, replica.parameters.items(), strict=True):
        groups.setdefault(number, {})[name] = parameter
    groups = groups or {0: {}}
    last = max(groups)
    return [
        Fragment(
            number,
            period * (number + 1) // count % period,
            parameters,
            replica.averaged if number == last else {},
        )
        for number, parameters in sorted(groups.items())
    ]


def _shared(fragment: Fragment, agreed: Agreed | None) -> dict[str, Tensor]:
    """Return what all replicas hold of a fragment, by the names under which it is saved."""
    kinds: dict[str, tuple[Sequence[str], Sequence[Tensor]]] = {
        "start": (list(fragment.parameters), fragment.start),
        "momentum": (list(fragment.parameters), fragment.momentum),
    }
    if agreed is not None:
        kinds["arriving"] = fragment.names, agreed.averages
        kinds["weights"] = [fragment.anchor], [agreed.weights]
    return {
        f"outer/{kind}/{name}": tensor
        for kind, (names, tensors) in kinds.items()
        for name, tensor in zip(names, tensors, strict=True)
    }


def _loaded(
    tensors: Mapping[str, Tensor], kind: str, targets: Mapping[str, Tensor]
) -> list[Tensor]:
    """Return copies of saved tensors in the memory format of `targets`; none if any is missing."""
    saved = [tensors.get(f"outer/{kind}/{name}") for name in targets]
    if any(value is None for value in saved):
        return []
    return [
        torch.empty_like(target, requires_grad=False).copy_(value)
        for target, value in zip(targets.values(), saved, strict=True)
        if value is not None
    ]
