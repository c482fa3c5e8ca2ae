"""The world of a run whose hardware is emulated.

Every run looks at it, so that this module loads nothing of the emulation itself.
"""

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import torch

from hvdtrain.parallel.exchange import Exchange
from hvdtrain.world import World

if TYPE_CHECKING:
    from hvdtrain.emulate.emulation import Emulation


@dataclass(frozen=True, kw_only=True)
class EmulatedWorld(World):
    """The world of a run whose hardware is emulated."""

    emulation: "Emulation"


def emulated(world: World, emulation: "Emulation") -> EmulatedWorld:
    """Return the world whose hardware is emulated."""
    kept: dict[str, Any] = {item.name: getattr(world, item.name) for item in fields(World)}
    return EmulatedWorld(**kept, emulation=emulation)


def emulation_of(world: World) -> "Emulation | None":
    """Return the emulation of a run; None on real hardware."""
    return world.emulation if isinstance(world, EmulatedWorld) else None


def exchange_of(world: World, device: torch.device, scale: float | None = None) -> Exchange:
    """Return the transfers of a run with several ranks. Collective.

    Args:
        scale: modelled bytes per byte of a message under an emulation, if it is another one than
            in training.
    """
    emulation = emulation_of(world)
    if emulation is not None:
        return emulation.exchange(world, device, scale)
    assert world.communicator is not None, "a single rank transfers nothing"
    return Exchange(world.communicator, device)
