"""Parameters of replicas with local steps, in every step: recorded, for test_histories.py.

    python -m tests.mpi.histories

records them anew from the serial simulations, in which nothing of `hvdtrain/sync` takes part. Do
that only if a method is meant to compute something else.
"""

import json
from pathlib import Path

import numpy as np

from tests.mpi.apart import METHODS, SIZE, History, Replicas, Weights, config_of, unequal
from tests.mpi.common import components_of

FILE = Path(__file__).with_name("histories.json")
STEPS, RANKS = 9, (2, 3, 4)


def projection(weights: Weights) -> float:
    """Return one number that depends on every element of the weights, and on their places."""
    flat = np.concatenate([weights[name].ravel() for name in sorted(weights)])
    return float(flat @ np.cos(np.arange(flat.size)))


def simulated(method: str, ranks: int) -> History:
    """Return the weights of each replica after each step, and after each epoch."""
    simulate, sync, options = METHODS[method]
    components = components_of("cnn", SIZE)
    config = config_of(sync, **options)
    period = config.sync_request.period  # type: ignore[union-attr] # of local steps
    return simulate(Replicas(config, unequal(ranks), components), period, STEPS)


def main() -> None:
    """Record the histories of all methods on all numbers of ranks."""
    histories = {
        f"{method}, {ranks} ranks": [
            [projection(weights) for weights in replicas] for replicas in simulated(method, ranks)
        ]
        for method in METHODS
        for ranks in RANKS
    }
    lines = (f"{json.dumps(name)}: {json.dumps(values)}" for name, values in histories.items())
    FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()
