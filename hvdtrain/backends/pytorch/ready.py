"""Agreement of all ranks on the weights of a model that was passed in Python."""

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from hvdtrain.errors import UsageError
from hvdtrain.models.component import Component
from hvdtrain.models.ready import ready_modules
from hvdtrain.parallel.checksums import digest
from hvdtrain.world import World


def agree_on_values(components: Sequence[Component], world: World) -> None:
    """Give the modules that components copy the weights that they have on rank 0. Collective.

    The seeds of a user's script may differ between ranks, and a stage of a pipeline is on one
    rank only.

    Raises:
        UsageError: on all ranks, if names, shapes or dtypes of their tensors differ.
    """
    if world.size == 1:
        return
    tensors = dict(_tensors(ready_modules(components)))
    forms = {name: (tuple(tensor.shape), str(tensor.dtype)) for name, tensor in tensors.items()}
    digests = {name: digest(tensor) for name, tensor in tensors.items()}
    gathered = world.gather((forms, digests))
    first_forms, first_digests = gathered[0]
    for rank, (other_forms, _) in enumerate(gathered):
        if differing := set(other_forms.items()) ^ set(first_forms.items()):
            name = min(name for name, _ in differing)
            raise UsageError(
                f"rank {rank} passed another model than rank 0, which differs in {name}: pass the "
                "same model on all ranks"
            )
    if all(other_digests == first_digests for _, other_digests in gathered):
        return
    with torch.no_grad():
        for tensor in tensors.values():
            tensor.copy_(world.broadcast(tensor.detach().cpu() if world.rank == 0 else None))


def _tensors(modules: Mapping[str, nn.Module]) -> Iterator[tuple[str, Tensor]]:
    for component, module in modules.items():
        for name, tensor in (*module.named_parameters(), *module.named_buffers()):
            yield f"{component}.{name}", tensor
