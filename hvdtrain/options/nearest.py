"""Suggestions for errors about an unknown name."""

import difflib
from collections.abc import Iterable

from hvdtrain.errors import UsageError, on_one_line
from hvdtrain.options.older import instead


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
