"""Seeds of the random numbers that a step draws.

They depend on the run's seed, the position and, except for dropout, the rank only.
"""

import hashlib


def step_seed(seed: int, position: int, rank: int | None) -> int:
    """Return the seed of this rank's generators in the step that starts at `position`.

    To resume, or to run a step again, no other state of the generators has to be saved.

    Args:
        rank: None for numbers that all ranks share: the masks of dropout.

    Returns:
        0 to 2**63 - 1.
    """
    digest = hashlib.blake2b(repr((seed, position, rank)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
