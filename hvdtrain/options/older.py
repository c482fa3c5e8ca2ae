"""Options of earlier versions, which saved configurations have: what became of each."""

from collections.abc import Mapping
from typing import Any

ANY = object()
FUNCTION = "give --optimizer, --lr-schedule or --augment a function, as recipes/cifar10_94.py does"
# The only value with which a run of today continues one of then, or ANY; what to do instead.
REMOVED: Mapping[str, tuple[Any, str]] = {
    "allow_approximate": (ANY, ""),
    "fragments": (1, ""),
    "overlap": (0, ""),
    "tf32": (False, "write --precision tf32"),
    "cudnn_benchmark": (ANY, "a GPU does so without --deterministic"),
    "change_batch_norm": (ANY, "with --batch-norm sync, --plan adaptive changes shares"),
    "no_decay": (
        "norm,bias,position",
        "give --optimizer a function, as recipes/vit_b16.yaml does",
    ),
    "lr_start": (0.0, FUNCTION),
    "lr_end": (0.0, FUNCTION),
    "lr_scale": ("none", FUNCTION),
    "lookahead": (None, FUNCTION),
    "lookahead_share": (0.77, FUNCTION),
    "flip": ("random", FUNCTION),
    "shift": (4, FUNCTION),
    "border": ("zeros", FUNCTION),
    "cutout": (None, FUNCTION),
    "whiten": (False, FUNCTION),
    "test_augment": ("none", FUNCTION),
}
# The default, the option that has it now, and the form of its value there.
FOLDED: Mapping[str, tuple[Any, str, str]] = {
    "average_optimizer": (False, "sync", "{},average-optimizer"),
    "outer_lr": (0.7, "sync", "{},lr={}"),
    "outer_momentum": (0.9, "sync", "{},momentum={}"),
    "elastic_rate": (None, "sync", "{},rate={}"),
    "servers": (1, "sync", "{},servers={}"),
    "label_smoothing": (0.0, "loss", "{}:{}"),
    "gradient_limit": (None, "on_bad_step", "{}:{}"),
    "min_ranks": (None, "restarts", "{}:{}"),
    "emulate_dilation": (None, "emulate", "{}:{}"),
    "memory_limit": (None, "plan", "{}:{}GiB"),
    "compress_after": (100, "compress", "{},after={}"),
}


def folded(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a configuration, with options of earlier versions in today's words.

    A value without a form of today stays as it is.

    Args:
        values: by name, as `--config` has them.
    """
    kept = dict(values)
    for name, (default, owner, form) in FOLDED.items():
        value = kept.get(name, default)
        if value == default:
            kept.pop(name, None)
        elif isinstance(kept.get(owner), str | int):
            kept[owner] = form.format(kept[owner], kept.pop(name))
    return kept


def completed(saved: Mapping[str, Any]) -> dict[str, Any]:
    """Return a saved configuration with what the first versions did before it was an option.

    All parameters decayed, and the mean included held-out images.
    """
    values = {"no_decay": "none"} if not {"loss", "no_decay"} & saved.keys() else {}
    if values and saved.get("holdout") and saved.get("normalise", "meanstd") == "meanstd":
        values["normalise"] = "split"
    values = {**saved, **values}
    if not saved.get("weight_decay"):
        values.pop("no_decay", None)
    return values


def lost(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of removed options that no run of today continues."""
    return {
        name: value
        for name, value in values.items()
        if name in REMOVED and REMOVED[name][0] not in (ANY, value)
    }


def instead(name: str) -> str:
    """Return what to write instead of an option of an earlier version; empty for another name."""
    if name in FOLDED:
        _, owner, form = FOLDED[name]
        return f"write --{owner.replace('_', '-')} {form.format('...', 'X')}"
    return REMOVED[name][1] if name in REMOVED else ""
