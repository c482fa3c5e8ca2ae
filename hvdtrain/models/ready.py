"""Models of users: a function, a list of components, or a module that exists already.

A module is one component, or `cut` makes its children, which run one after another, components.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn.parameter import UninitializedParameter
from typing_extensions import override

from hvdtrain.data.index import InputSize
from hvdtrain.errors import UsageError, one_line
from hvdtrain.models import find
from hvdtrain.models.component import (
    Component,
    as_components,
    check_names,
    isolated,
)
from hvdtrain.models.shapes import component_seed

WHOLE = "model"  # the component of a module that is not cut
ADVICE = "restructure it as an nn.Sequential, or train it whole under single or dp"


def components_of(
    name: str,
    model: object,
    classes: int,
    image_size: InputSize,
    patch_size: int | None,
    seed: int,
) -> list[Component]:
    """Return the components of a user's model, whatever kind it is.

    Args:
        name: of the model, for errors.
        model: a function of (classes, image_size), a list of components, or a module.
        classes, image_size, patch_size: as in `models.components`.
        seed: of the random numbers that a function draws outside of the build functions.

    Raises:
        UsageError: if the function fails, or its result is no model.
    """
    if isinstance(model, nn.Module):
        find.refuse_patches(name, patch_size)
        return [Component(WHOLE, CopyOf(model))]
    if not callable(model):
        find.refuse_patches(name, patch_size)
        return as_components(name, model)
    build = partial(find.call, name, model, classes, image_size, patch_size)
    # A function may build modules at once, as the argument of `cut`: all ranks draw the same.
    with isolated(component_seed(seed, name), "cpu"):
        returned = build()
    if not isinstance(returned, nn.Module):
        return as_components(name, returned)

    def build_module() -> nn.Module:
        module = build()
        assert isinstance(module, nn.Module)
        return module

    return [Component(WHOLE, build_module)]


@dataclass(frozen=True)
class CopyOf:
    """A component's build function that copies a module with its weights.

    Attributes:
        module: the module, which is not changed.
        before, after: what runs before and after it, without parameters; None for nothing.
    """

    module: nn.Module
    before: nn.Module | None = None
    after: nn.Module | None = None

    def __call__(self) -> nn.Module:
        """Return a copy on torch's default device; on the meta device without values."""
        module = _copied(self.module)
        if getattr(module, "inplace", False) is True:
            module.inplace = False  # type: ignore[assignment]  # its input is another component's
        if self.before is not None:
            module.register_forward_pre_hook(partial(_run_before, self.before))
        if self.after is not None:
            module.register_forward_hook(partial(_run_after, self.after))
        return module


def _run_before(steps: nn.Module, module: nn.Module, inputs: tuple[Tensor, ...]) -> Tensor:
    prepared: Tensor = steps(*inputs)
    return prepared


def _run_after(
    steps: nn.Module, module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor
) -> Tensor:
    finished: Tensor = steps(output)
    return finished


def _copied(module: nn.Module) -> nn.Module:
    """Return a deep copy with all parameters and buffers on torch's default device.

    Raises:
        UsageError: if the module cannot be copied.
    """
    device = torch.get_default_device()
    tensors: dict[int, Any] = {}
    for tensor in (*module.parameters(), *module.buffers()):
        if isinstance(tensor, UninitializedParameter):
            raise UsageError(
                f"{type(module).__name__} has lazy modules without weights: run it once first"
            )
        values = tensor.detach().to(device, copy=True)
        is_parameter = isinstance(tensor, nn.Parameter)
        tensors[id(tensor)] = (
            nn.Parameter(values, tensor.requires_grad) if is_parameter else values
        )
    try:
        return copy.deepcopy(module, tensors)
    except Exception as error:
        raise UsageError(
            f"{type(module).__name__} cannot be copied ({one_line(error)}): pass a function of "
            "(classes, image_size) that builds it"
        ) from error


def ready_modules(components: Sequence[Component]) -> dict[str, nn.Module]:
    """Return the modules that components copy, by component."""
    return {part.name: part.build.module for part in components if isinstance(part.build, CopyOf)}


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
    components: list[Component] = []
    for run in runs:
        name, number = run.target, 1
        while name in [part.name for part in components]:  # a child without weights may run again
            number += 1
            name = f"{run.target}-{number}"
        child = module.get_submodule(run.target)
        before, after = _operations(module, run.before), _operations(module, run.after)
        components.append(Component(name, CopyOf(child, before, after)))
    check_names(components)
    return components


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


def _is_chain(module: nn.Module) -> bool:
    return type(module).forward is nn.Sequential.forward and len(module._modules) > 0


def _refuse_hooks(module: nn.Module) -> None:
    for name, chain in module.named_modules():
        is_opened = chain is module or _is_chain(chain)
        if is_opened and (chain._forward_hooks or chain._forward_pre_hooks):
            raise UsageError(
                f"{name or type(module).__name__} has forward hooks, which a cut would lose: "
                "remove them"
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
            if len(node.args) != 1 or node.kwargs or not isinstance(node.args[0], fx.Node):
                raise UsageError(f"{kind} calls {node.target} with more than one tensor: {ADVICE}")
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


def _check_end(kind: str, value: object, before: Sequence[fx.Node], start: object) -> None:
    """Refuse a child whose input is not the result of the operations before it."""
    if value is not (before[-1] if before else start):
        raise UsageError(
            f"{kind} cannot be cut, because its children do not run one after another: {ADVICE}"
        )


def _operations(module: nn.Module, nodes: Sequence[fx.Node]) -> nn.Module | None:
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


def _shown(node: fx.Node) -> str:
    return str(node.target) if node.op == "call_module" else node.name
