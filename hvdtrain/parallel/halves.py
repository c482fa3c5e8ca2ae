"""A backward in two halves: the gradient of the input first, those of the weights later.

This is the split of zero-bubble schedules (Qi et al., "Zero Bubble Pipeline Parallelism", arXiv
2401.10241) on autograd's graph. The first half runs every node from which the input can be
reached. Where a path to a weight branches off from one of these nodes, the first half records the
gradients that arrive at the node, and the second half continues from there. Autograd itself adds
the results to `grad`, so that hooks on parameters fire.

Where the halves would not be exact, the first is a whole backward and the second does nothing:
where the input is not in the graph (a frozen component at the start of a stage), and where a
backward is written in Python (`autograd.Function`, reentrant checkpoints), or packs what it saves
(other checkpoints): both would run twice.
"""

from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

Incoming = tuple[Tensor | None, ...]  # the gradients of a node's outputs
Parents = dict[Node, list[Node]]  # for each node those whose backward passes it gradients


@dataclass
class Group:
    """Parameters whose gradients are computed together.

    Attributes:
        parameters: the parameters.
        incoming: the nodes from which their backward starts, with the recorded gradients of the
            nodes' outputs; None where no gradient has arrived.
    """

    parameters: list[nn.Parameter]
    incoming: dict[Node, Incoming | None]


def backward_input(
    output: Tensor,
    gradient: Tensor | None,
    input: Tensor,
    parameters: Iterable[nn.Parameter],
    is_whole: bool = False,
) -> list[Group]:
    """Add the gradient of `input` to its `grad`; return the groups for `backward_weight`.

    Args:
        output: of the stage, or the loss.
        gradient: of the output; None for a loss.
        input: the stage's input, a leaf of the graph.
        parameters: the stage's parameters.
        is_whole: whether to run the whole backward now.
    """
    if not output.requires_grad:
        return []
    parents = _parents(get_gradient_edge(output).node)
    source = get_gradient_edge(input).node if input.requires_grad else None
    if (
        is_whole
        or source is None
        or source not in parents
        or any(isinstance(node, BackwardCFunction) for node in parents)
    ):
        torch.autograd.backward(output, gradient)
        return []
    groups = _groups(parameters, parents, _ancestors(source, parents)[0])
    now: list[Tensor] = [input]
    for group in groups:
        if any(map(_crashes_without_input, group.incoming)):
            now += group.parameters
            group.incoming.clear()  # nothing is left for the second half
    groups = [group for group in groups if group.incoming]
    hooks = [
        node.register_prehook(_recorder(group.incoming, node))
        for group in groups
        for node in group.incoming
    ]
    try:
        torch.autograd.backward(output, gradient, retain_graph=True, inputs=now)
    finally:
        for hook in hooks:
            hook.remove()
    return groups


def backward_weight(groups: Sequence[Group]) -> None:
    """Add the gradients of the parameters to their `grad`."""
    for group in groups:
        recorded = [(node, incoming) for node, incoming in group.incoming.items() if incoming]
        edges = [
            (GradientEdge(node, place), value)
            for node, incoming in recorded
            for place, value in enumerate(incoming)
            if value is not None
        ]
        if not edges:
            continue
        # The recorded gradients are complete: neither gradients that flow from one of the nodes to
        # another nor the model's own hooks on the nodes may change them again.
        hooks = [node.register_prehook(_replacing(incoming)) for node, incoming in recorded]
        try:
            # The path to a tied weight can lead through nodes of another group.
            torch.autograd.backward(
                [edge for edge, _ in edges],
                [value for _, value in edges],
                retain_graph=True,
                inputs=group.parameters,
            )
        finally:
            for hook in hooks:
                hook.remove()
        group.incoming.clear()


def _groups(
    parameters: Iterable[nn.Parameter], parents: Parents, to_input: set[Node]
) -> list[Group]:
    """Group parameters that share nodes at which their paths leave those to the input."""
    groups: list[Group] = []
    for parameter in parameters:
        leaf = get_gradient_edge(parameter).node if parameter.requires_grad else None
        if leaf is None or leaf not in parents:
            continue
        starts = _ancestors(leaf, parents, to_input)[1]
        merged = Group([parameter], dict.fromkeys(starts))
        others = []
        for group in groups:
            if starts.isdisjoint(group.incoming):
                others.append(group)
            else:
                merged.parameters += group.parameters
                merged.incoming |= group.incoming
        groups = [*others, merged]
    return groups


def _parents(root: Node) -> Parents:
    """Return every node of the graph with the nodes that pass gradients to it."""
    parents: Parents = defaultdict(list)
    parents[root] = []
    waiting = deque([root])
    while waiting:
        node = waiting.popleft()
        for child, _ in node.next_functions:
            if child is None:
                continue
            if child not in parents:
                waiting.append(child)
            parents[child].append(node)
    return parents


def _ancestors(
    node: Node, parents: Parents, ends: Collection[Node] = ()
) -> tuple[set[Node], set[Node]]:
    """Return the nodes from which gradients reach `node`, itself included, and where they stop.

    The search stops at nodes in `ends`; those that it reaches are the second set.
    """
    seen, ended = {node}, set[Node]()
    waiting = deque(seen)
    while waiting:
        for parent in parents[waiting.popleft()]:
            if parent in ends:
                ended.add(parent)
            elif parent not in seen:
                seen.add(parent)
                waiting.append(parent)
    return seen, ended


def _crashes_without_input(node: Node) -> bool:
    """Return whether PyTorch crashes where only gradients of a node's weights are wanted.

    PyTorch 2.13 does in GroupNorm on a CPU, for inputs in channels_last format. Their weights get
    their gradients in the first half.
    """
    is_norm = node.name() == "NativeGroupNormBackward0"
    return is_norm and not getattr(node, "_saved_input").is_contiguous()  # noqa: B009


def _recorder(incoming: dict[Node, Incoming | None], node: Node) -> Callable[[Incoming], None]:
    def record(gradients: Incoming) -> None:
        incoming[node] = gradients

    return record


def _replacing(incoming: Incoming) -> Callable[[Incoming], Incoming]:
    return lambda _: incoming
