"""The device of a rank: the CPU or a GPU, and whether Horovod can sum on the GPUs of all ranks."""

import socket
from collections.abc import Sequence

import torch

from hvdtrain import world as worlds
from hvdtrain.errors import UsageError
from hvdtrain.world import World

Place = tuple[str, str]  # a host and the UUID of one of its GPUs


def choose_device(name: str | None, world: World, option: str = "--device") -> torch.device:
    """Return the CPU, or the GPU of this rank: local rank modulo visible GPUs.

    Args:
        name: "cpu" or "cuda"; None: the GPU if there is one.
        option: its name in messages.

    Raises:
        UsageError: if there is no such device.
    """
    available = torch.cuda.is_available()
    if name not in (None, "cpu", "cuda"):
        raise UsageError(f"there is no device {name!r}: use cpu or cuda")
    if name == "cuda" and not available:
        raise UsageError(f"{option} cuda: PyTorch sees no GPU on this host: use {option} cpu")
    if name == "cpu" or not available:
        return torch.device("cpu")
    device = torch.device("cuda", world.local_rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def check_horovod_on(device: torch.device, world: World) -> None:
    """Refuse GPUs on which Horovod cannot sum. Collective.

    Without NCCL a sum of tensors on a GPU would never end, and NCCL accepts one rank per GPU.

    Raises:
        UsageError: with the reason, the same on all ranks; or if Horovod cannot be loaded.
    """
    place, has_nccl = None, True
    if device.type == "cuda":
        place = (socket.gethostname(), _uuid(device))
        has_nccl = bool(worlds.horovod_module("torch", world.size).nccl_built())
    everywhere = world.gather((place, has_nccl))
    if not all(has_it for _, has_it in everywhere):
        raise UsageError(
            "Horovod is built without NCCL, so it cannot sum on GPUs: run hvdtrain setup --cuda, "
            "or use --reduce-with mpi"
        )
    if shared := ranks_on_one_gpu([place for place, _ in everywhere]):
        ranks = " and ".join(map(str, shared))
        raise UsageError(
            f"ranks {ranks} share a GPU, which NCCL does not accept: start one rank per GPU, "
            "or use --reduce-with mpi"
        )


def ranks_on_one_gpu(places: Sequence[Place | None]) -> list[int]:
    """Return the ranks of the first GPU that several ranks have; empty if there is none.

    Args:
        places: host and GPU of each rank; None for a rank on a CPU.
    """
    for place in dict.fromkeys(places):
        ranks = [rank for rank, other in enumerate(places) if other == place]
        if place is not None and len(ranks) > 1:
            return ranks
    return []


def _uuid(device: torch.device) -> str:
    return str(torch.cuda.get_device_properties(device).uuid)
