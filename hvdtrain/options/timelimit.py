"""Limits of time and of memory in the formats of Slurm."""

import re

FORMS = "minutes, M:SS, H:MM:SS, D-HH, D-HH:MM or D-HH:MM:SS"
MEMORY_FORMS = "megabytes, or a whole number with K, M, G or T, such as 16G"
_PARTS = re.compile(r"(?:(\d{1,6})-)?(\d{1,9})(?::(\d{1,2}))?(?::(\d{1,2}))?", re.ASCII)


def minutes(text: str) -> int | None:
    """Return a limit in whole minutes, seconds rounded up; None for any other text.

    The forms are those of `sbatch --time` (https://slurm.schedmd.com/sbatch.html#OPT_time): one
    number is minutes, two are minutes and seconds, and after days the first number is hours.

    >>> minutes("12"), minutes("1:30"), minutes("1:30:00"), minutes("1-12")
    (12, 2, 90, 2160)
    """
    match = _PARTS.fullmatch(text)
    if match is None:
        return None
    days, first, second, third = (int(part or 0) for part in match.groups())
    if match[1] is None and match[4] is None:
        hours, whole, seconds = 0, first, second
    elif second < 60:
        hours, whole, seconds = first, second, third
    else:
        return None
    return (days * 24 + hours) * 60 + whole + -(-seconds // 60) if seconds < 60 else None
