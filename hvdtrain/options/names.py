"""Names of options: suggestions for unknown ones, and what became of those of earlier versions."""

import difflib
from collections.abc import Iterable, Mapping
from typing import Any

from hvdtrain.errors import UsageError, on_one_line


def nearest(name: str, valid: Iterable[str]) -> str:
    """Return a suggestion to append to an error about an unknown name, empty if `valid` is."""
    valid = sorted(valid)
    close = difflib.get_close_matches(name, valid, n=3, cutoff=0.6)
    if close:
        return f"; did you mean {' or '.join(close)}?"
    return f"; valid are {', '.join(valid)}" if valid else ""


def unknown_key(
    source: object, key: object, valid: Iterable[str], switches: Iterable[str] = ()
) -> UsageError:
    """Return the error for an unknown key in a file, always in one line.

    Args:
        switches: keys of boolean options, which the command line also accepts as --no-KEY.
    """
    shown = on_one_line(key)
    switch = shown[3:].replace("-", "_")
    if shown.startswith(("no-", "no_")) and switch in switches:
        return UsageError(f"{source}: write `{switch}: false` instead of `{shown}`")
    if advice := instead(shown):
        return UsageError(f"{source}: {shown} is not an option of this version: {advice}")
    return UsageError(f"{source}: unknown key {shown}{nearest(shown, valid)}")


ANY = object()
FUNCTION = "give --optimizer, --lr-schedule or --augment a function, as recipes/cifar10_94.py does"
# The only value with which a run of today continues one of then, or ANY; what to do instead.
REMOVED: Mapping[str, tuple[Any, str]] = {
    "allow_approximate": (ANY, ""),
    "fragments": (1, ""),
    "overlap": (0, ""),
    "cudnn_benchmark": (ANY, "set torch.backends.cudnn.benchmark in a module of yours"),
    "change_batch_norm": (ANY, "with --batch-norm sync, --plan adaptive changes shares"),
    "no_decay": (
        "bias,norm,position",
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
    "compress_after": (100, "compress", "{},after={}"),
    "label_smoothing": (0.0, "loss", "{}:{}"),
    "tf32": (False, "precision", "tf32"),
    "memory_limit": (None, "plan", "{}:{}GiB"),
    "gradient_limit": (None, "on_bad_step", "{}:{}"),
    "min_ranks": (None, "restarts", "{},min-ranks={}"),
    "emulate_dilation": (None, "emulate", "{}:{}"),
}
# The values of these options that may have it, their defaults, and values to show of others.
OWNERS = {"loss": ("cross-entropy",), "precision": ("fp32",), "plan": ("auto", "adaptive")}
IMPLIED = {"loss": "cross-entropy", "precision": "fp32", "on_bad_step": "stop"}
EXAMPLES = {"plan": "auto", "restarts": "N", "emulate": "CLUSTER"}


def folded(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a configuration, with options of earlier versions in today's words.

    A value without a form of today stays as it is.

    Args:
        values: by name, as `--config` has them.
    """
    kept = dict(values)
    for name, (default, owner, form) in FOLDED.items():
        if kept.get(name, default) == default:
            kept.pop(name, None)
            continue
        before, owners = kept.get(owner, IMPLIED.get(owner)), OWNERS.get(owner)
        may_have_it = isinstance(before, str | int) if owners is None else before in owners
        if may_have_it:
            kept[owner] = form.format(before, kept.pop(name))
    if isinstance(kinds := kept.get("no_decay"), str):
        kept["no_decay"] = ",".join(sorted(kinds.replace(" ", "").split(",")))
    return {
        name: value
        for name, value in kept.items()
        if name not in REMOVED or REMOVED[name][0] not in (ANY, value)
    }


def completed(saved: Mapping[str, Any]) -> dict[str, Any]:
    """Return a saved configuration in today's words, with what the first versions did.

    All parameters decayed, and the mean included held-out images.
    """
    values = dict(saved)
    if not {"loss", "no_decay"} & saved.keys():
        values["no_decay"] = "none"
        if saved.get("holdout") and saved.get("normalise", "meanstd") == "meanstd":
            values["normalise"] = "split"
    if not saved.get("weight_decay"):
        values.pop("no_decay", None)
    return folded(values)


def lost(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a configuration in today's words has and no run of today can have."""
    return {name: value for name, value in values.items() if name in REMOVED or name in FOLDED}


def instead(name: str) -> str:
    """Return what to write instead of an option of an earlier version; empty for another name."""
    if name in FOLDED:
        _, owner, form = FOLDED[name]
        example = (IMPLIED | EXAMPLES).get(owner, "METHOD")
        return f"write --{owner.replace('_', '-')} {form.format(example, 'X')}"
    return REMOVED[name][1] if name in REMOVED else ""
