"""A backward in two halves: the gradient of the input first, those of the weights later.

The split of zero-bubble schedules (Qi et al., "Zero Bubble Pipeline Parallelism", arXiv
2401.10241) on autograd's graph. Each node from which the input can be reached runs in the first
half. Of these, the ones that lead to weights by other ways are kept with the gradients that came
in, and the second half goes on from there. What it computes is added to `grad` by autograd itself,
so that hooks on parameters fire.

Where the halves would not be exact, the first one is a whole backward and the second does nothing:
where the input has no part in the graph (a frozen component at the start of a stage), and where a
backward is written in Python (`autograd.Function`, reentrant checkpoints): it would run twice.
"""

from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

Incoming = tuple[Tensor | None, ...]  # the gradients of a node's outputs
Parents = dict[Node, list[Node]]  # in the order of backward: those that hand gradients to a node


@dataclass
class Group:
    """Parameters whose gradients are computed together, and where that begins."""

    parameters: list[nn.Parameter]
    incoming: dict[Node, Incoming | None]


def backward_input(
    output: Tensor, gradient: Tensor | None, given: Tensor, parameters: Iterable[nn.Parameter]
) -> list[Group]:
    """Add the gradient of `given` to its grad; what `backward_weight` needs is returned.

    Args:
        output: of the stage, or the loss. gradient: of the output; None for a loss.
        given: the stage's input, a leaf of the graph.
    """
    if not output.requires_grad:
        return []
    parents = _parents(get_gradient_edge(output).node)
    source = get_gradient_edge(given).node if given.requires_grad else None
    if (
        source is None
        or source not in parents
        or any(isinstance(node, BackwardCFunction) for node in parents)
    ):
        torch.autograd.backward(output, gradient)
        return []
    groups = _groups(parameters, parents, _ancestors(source, parents)[0])
    hooks = [
        node.register_prehook(_recorder(group.incoming, node))
        for group in groups
        for node in group.incoming
    ]
    try:
        torch.autograd.backward(output, gradient, retain_graph=True, inputs=[given])
    finally:
        for hook in hooks:
            hook.remove()
    return groups


def backward_weight(groups: Sequence[Group]) -> None:
    """Add the gradients of the weights to theirs."""
    for group in groups:
        found = [(node, incoming) for node, incoming in group.incoming.items() if incoming]
        edges = [
            (GradientEdge(node, place), value)
            for node, incoming in found
            for place, value in enumerate(incoming)
            if value is not None
        ]
        if not edges:
            continue
        # The gradients are complete already: neither what flows from one of the nodes to another
        # nor the hooks that a model has there may change them again.
        hooks = [node.register_prehook(_replacing(incoming)) for node, incoming in found]
        try:
            # A tied weight's way can lead through the nodes of another group.
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
    parameters: Iterable[nn.Parameter], parents: Parents, on_the_way: set[Node]
) -> list[Group]:
    """Parameters by the nodes on the way to the input that lead to them, alike ones together."""
    groups: list[Group] = []
    for parameter in parameters:
        leaf = get_gradient_edge(parameter).node if parameter.requires_grad else None
        if leaf is None or leaf not in parents:
            continue
        begins = _ancestors(leaf, parents, on_the_way)[1]
        merged = Group([parameter], dict.fromkeys(begins))
        others = []
        for group in groups:
            if begins.isdisjoint(group.incoming):
                others.append(group)
            else:
                merged.parameters += group.parameters
                merged.incoming |= group.incoming
        groups = [*others, merged]
    return groups


def _parents(root: Node) -> Parents:
    """Every node of a graph with those that hand gradients to it."""
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
    """A node with all that hand gradients to it, as far as the first ones in `ends`, and these."""
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


def _recorder(incoming: dict[Node, Incoming | None], node: Node) -> Callable[[Incoming], None]:
    def record(gradients: Incoming) -> None:
        incoming[node] = gradients

    return record


def _replacing(incoming: Incoming) -> Callable[[Incoming], Incoming]:
    return lambda _: incoming
