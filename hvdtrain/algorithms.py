"""Environment variables that select an all-reduce algorithm of an MPI library when it starts.

Thakur, Rabenseifner and Gropp, "Optimization of Collective Communication Operations in MPICH",
2005, describes all of them but the hierarchical one.
"""

from collections.abc import Mapping


def _open_mpi(number: int, **more: str) -> dict[str, str]:
    return {
        "OMPI_MCA_coll_tuned_use_dynamic_rules": "1",
        "OMPI_MCA_coll_tuned_allreduce_algorithm": str(number),
        "OMPI_MCA_coll_han_priority": "0",
        **{f"OMPI_MCA_coll_{name}": value for name, value in more.items()},
    }


# The variables of Open MPI, and of MPICH and its relatives. Other libraries ignore them.
ALGORITHMS: Mapping[str, Mapping[str, str]] = {
    "auto": {},
    "ring": _open_mpi(4) | {"MPIR_CVAR_ALLREDUCE_INTRA_ALGORITHM": "ring"},
    "recursive-doubling": _open_mpi(3)
    | {"MPIR_CVAR_ALLREDUCE_INTRA_ALGORITHM": "recursive_doubling"},
    "rabenseifner": _open_mpi(6)
    | {"MPIR_CVAR_ALLREDUCE_INTRA_ALGORITHM": "reduce_scatter_allgather"},
    # A reduction to one rank and a broadcast from it, each along a binomial tree.
    "tree": _open_mpi(2, tuned_reduce_algorithm="5", tuned_bcast_algorithm="6")
    | {"MPIR_CVAR_ALLREDUCE_INTRA_ALGORITHM": "tree"},
    # First on each node, then between nodes.
    "hierarchical": {
        "OMPI_MCA_coll_han_priority": "100",
        "MPIR_CVAR_ALLREDUCE_INTRA_ALGORITHM": "smp",
    },
}
