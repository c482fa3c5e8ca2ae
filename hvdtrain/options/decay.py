"""A rule by names for parameters without weight decay, or with a learning rate of their own."""

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


def parse_scales(text: str) -> dict[str, float]:
    """Return the factors of the learning rate by kind of parameter that `--lr-scale` gives.

    Raises:
        UsageError: for a kind that does not exist, or a factor that is not above 0.
    """
    scales: dict[str, float] = {}
    for word in text.split(",") if text.strip() != "none" else ():
        kind, _, value = (part.strip() for part in word.partition("="))
        factor = float(value) if re.fullmatch(r"\d+(\.\d*)?", value) else 0.0
        if kind not in KINDS or kind in scales or factor <= 0:
            raise UsageError(
                f"--lr-scale {text} is not understood: give factors above 0 of some of "
                f"{', '.join(KINDS)}, such as norm=64,bias=2, or none"
            )
        scales[kind] = factor
    return scales


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
