"""The name of `hvdtrain.keras` in version 0.1.0, for programs that import it."""

from hvdtrain.keras import *  # noqa: F403
from hvdtrain.keras import __all__ as __all__
