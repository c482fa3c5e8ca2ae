"""Cutting a module whose children run one after another into components."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from torch import Tensor, fx, nn
from typing_extensions import override

from hvdtrain.errors import UsageError, one_line
from hvdtrain.models.component import Component, check_names
from hvdtrain.models.ready import CopyOf

ADVICE = "restructure it as an nn.Sequential, or train it whole under single or dp"


@dataclass
class _Run:
    """One call of a child, and the operations around it.

    Attributes:
        before, after: nodes of the traced graph without modules.
    """

    target: str
    before: list[fx.Node] = field(default_factory=list)
    after: list[fx.Node] = field(default_factory=list)


class _Tracer(fx.Tracer):
    """Traces the forward of a module, and of each nn.Sequential in it, down to their children."""

    @override
    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return not _is_chain(m)


def cut(module: nn.Module) -> list[Component]:
    """Cut a module whose children run one after another into components, one per child.

    Each nn.Sequential inside is cut into its children, too. Operations between two children, such
    as torch.flatten, stay with the child before them. A component has the dotted name of its
    child, so that the parameters keep their names, and copies the weights that the child has. The
    module itself is not changed.

    Args:
        module: takes images [n, 3, size, size] and returns logits [n, classes].

    Returns:
        The components, a model for `TrainConfig(model=...)`.

    Raises:
        UsageError: if the children do not run one after another, if two of them share weights, or
            if the module uses parameters outside of its children.
    """
    if not isinstance(module, nn.Module):
        raise UsageError(f"cut takes a torch.nn.Module, not a {type(module).__name__}")
    _refuse_hooks(module)
    runs = _runs(module, _trace(module))
    _refuse_shared(module, [run.target for run in runs])
    components = [
        Component(
            name,
            CopyOf(
                module.get_submodule(run.target),
                _steps(module, run.before),
                _steps(module, run.after),
            ),
        )
        for name, run in zip(_distinct(run.target for run in runs), runs, strict=True)
    ]
    check_names(components)
    return components


def _is_chain(module: nn.Module) -> bool:
    return type(module).forward is nn.Sequential.forward and len(module._modules) > 0


def _refuse_hooks(module: nn.Module) -> None:
    for name, chain in module.named_modules():
        is_opened = chain is module or _is_chain(chain)
        if is_opened and (chain._forward_hooks or chain._forward_pre_hooks):
            raise UsageError(
                f"{_called(module, name)} has forward hooks, which a cut would lose: remove them"
            )


def _trace(module: nn.Module) -> fx.Graph:
    """Return the graph of the forward, in which each child is one node.

    Raises:
        UsageError: if torch.fx cannot trace it, or it differs between training and evaluation.
    """
    mode, graphs = module.training, []
    try:
        for is_training in (True, False):
            module.training = is_training  # of this module alone: its children are not traced
            graphs.append(_Tracer().trace(module))
    except Exception as error:
        raise UsageError(
            f"{type(module).__name__} cannot be cut, because its forward cannot be traced "
            f"({one_line(error)}): {ADVICE}"
        ) from error
    finally:
        module.training = mode
    training, evaluation = (graph.python_code("self").src for graph in graphs)
    if training != evaluation:
        raise UsageError(
            f"{type(module).__name__} cannot be cut, because its own forward depends on "
            "self.training: use modules for that, such as nn.Dropout"
        )
    return graphs[0]


def _runs(module: nn.Module, graph: fx.Graph) -> list[_Run]:
    """Return the calls of children in order.

    Raises:
        UsageError: if they do not form a chain.
    """
    kind = type(module).__name__
    runs: list[_Run] = []
    waiting: list[fx.Node] = []  # operations before the first child
    start: fx.Node | None = None  # the value that the current operations start from
    seen: set[fx.Node] = set()
    for node in graph.nodes:
        if node.op == "placeholder":
            if node.users and start is not None:
                raise UsageError(f"{kind} takes several inputs: a model takes images alone")
            start, seen = start or node, {start or node}
            continue
        if node.op == "get_attr":
            raise UsageError(
                f"{kind} uses {node.target} outside of its children: put it into a child module"
            )
        if not set(node.all_input_nodes) <= seen:
            earlier = next(one for one in node.all_input_nodes if one not in seen)
            raise UsageError(
                f"{kind} cannot be cut, because the output of {_shown(earlier)} is used again "
                f"after another child, by {_shown(node)}: {ADVICE}"
            )
        if node.op == "call_module":
            _check_call(kind, node)
            last = waiting if not runs else runs[-1].after
            _check_end(kind, node.args[0], last, start)
            runs.append(_Run(str(node.target), waiting))
            waiting, start, seen = [], node, {node}
        elif node.op == "output":
            _check_end(kind, node.args[0], runs[-1].after if runs else waiting, start)
        else:
            (runs[-1].after if runs else waiting).append(node)
            seen.add(node)
    if not runs:
        raise UsageError(f"{kind} has no children to cut at")
    return runs


def _check_call(kind: str, node: fx.Node) -> None:
    if len(node.args) != 1 or node.kwargs or not isinstance(node.args[0], fx.Node):
        raise UsageError(f"{kind} calls {node.target} with more than one tensor: {ADVICE}")


def _check_end(kind: str, value: object, steps: Sequence[fx.Node], start: object) -> None:
    """Refuse a child whose input is not the result of the operations before it."""
    if value is not (steps[-1] if steps else start):
        raise UsageError(
            f"{kind} cannot be cut, because its children do not run one after another: {ADVICE}"
        )


def _steps(module: nn.Module, nodes: Sequence[fx.Node]) -> nn.Module | None:
    """Return operations of one tensor as a module; None if there are none."""
    if not nodes:
        return None
    graph = fx.Graph()
    value = graph.placeholder("value")
    copies: dict[fx.Node, fx.Node] = {}
    for node in nodes:
        copies[node] = graph.node_copy(node, lambda earlier: copies.get(earlier, value))
    graph.output(copies[nodes[-1]])
    return fx.GraphModule(module, graph)


def _refuse_shared(module: nn.Module, targets: Sequence[str]) -> None:
    """Refuse two children that share parameters or buffers, or a child that runs twice with some.

    Raises:
        UsageError: naming both.
    """
    owner: dict[int, str] = {}
    for place, target in enumerate(targets):
        child = module.get_submodule(target)
        tensors = [*child.parameters(), *child.buffers()]
        if tensors and target in targets[:place]:
            raise UsageError(f"{target} runs twice: a cut model cannot share its weights")
        for key in {_storage(tensor) for tensor in tensors}:
            if owner.setdefault(key, target) != target:
                raise UsageError(
                    f"{owner[key]} and {target} share weights, which a cut model cannot: give "
                    "each its own, or train it whole under single or dp"
                )


def _storage(tensor: Tensor) -> int:
    """Return a number that is the same for tensors on the same memory."""
    if tensor.device.type == "meta" or tensor.numel() == 0:
        return id(tensor)
    return tensor.untyped_storage().data_ptr()


def _distinct(targets: Iterator[str]) -> list[str]:
    """Return names for the calls; a child without weights may run several times."""
    names: list[str] = []
    for target in targets:
        name, number = target, 1
        while name in names:
            number += 1
            name = f"{target}-{number}"
        names.append(name)
    return names


def _shown(node: fx.Node) -> str:
    return str(node.target) if node.op == "call_module" else node.name


def _called(module: nn.Module, name: str) -> str:
    return name or type(module).__name__
