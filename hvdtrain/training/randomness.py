"""What is drawn in a step: from the seed, the position and, but for dropout, the rank alone."""

import hashlib


def step_seed(seed: int, position: int, rank: int | None) -> int:
    """Of this rank's generators in the step that begins at `position`: 0 to 2**63 - 1.

    None for what all ranks share: the masks of dropout.

    Nothing else has to be saved to resume, or to run a step again.
    """
    digest = hashlib.blake2b(repr((seed, position, rank)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
