"""A rule by names for parameters without weight decay."""

import re

POSITION = re.compile(r"pos_?emb|(?<![a-z])position|(class|cls)_?(token|emb)", re.IGNORECASE)


def is_exempt(name: str, layer: str, dimensions: int) -> bool:
    """Return whether a parameter is a scale, a shift, a bias, or a position or class embedding.

    Args:
        name: the parameter's name with its path, such as "ln_1.weight".
        layer: the class, or the name, of the layer that holds it.
    """
    last = re.split(r"[./]", name)[-1].lower()
    is_norm = "norm" in layer.lower() or last in ("gamma", "beta")
    return "bias" in last or bool(POSITION.search(name)) or (is_norm and dimensions <= 1)
