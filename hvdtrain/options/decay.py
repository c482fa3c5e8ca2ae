"""A rule by names for parameters without weight decay."""

import re

from hvdtrain.errors import UsageError

KINDS = ("norm", "bias", "position")
POSITION = re.compile(r"pos_?emb|(?<![a-z])position|(class|cls)_?(token|emb)", re.IGNORECASE)


def parse(text: str) -> frozenset[str]:
    """Return the kinds of parameters that `--no-decay` names.

    Raises:
        UsageError: for a kind that does not exist.
    """
    words = [word.strip() for word in text.split(",")]
    if words == ["none"]:
        return frozenset()
    for word in words:
        if word not in KINDS:
            raise UsageError(
                f"--no-decay {text} is not known: use some of {','.join(KINDS)}, or none"
            )
    return frozenset(words)


def is_exempt(kinds: frozenset[str], name: str, layer: str, dimensions: int) -> bool:
    """Return whether a parameter is of one of these kinds.

    Args:
        name: the parameter's name with its path, such as "ln_1.weight".
        layer: the class, or the name, of the layer that holds it.
    """
    last = re.split(r"[./]", name)[-1].lower()
    if "bias" in kinds and "bias" in last:
        return True
    if "position" in kinds and POSITION.search(name):
        return True
    is_norm = "norm" in layer.lower() or last in ("gamma", "beta")
    return "norm" in kinds and is_norm and dimensions <= 1
