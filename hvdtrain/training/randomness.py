"""What random layers draw in a step: from the seed, the position and the rank alone."""

import hashlib


def step_seed(seed: int, position: int, rank: int) -> int:
    """Of this rank's generators in the step that begins at `position`: 0 to 2**63 - 1.

    Nothing else has to be saved to resume, or to run a step again.
    """
    digest = hashlib.blake2b(repr((seed, position, rank)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
