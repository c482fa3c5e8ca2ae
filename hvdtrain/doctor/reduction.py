"""Checks of all-reduces: correctness, time and algorithm."""

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

from hvdtrain.doctor.check import Check
from hvdtrain.doctor.process import WATCHED_SIZES, Answer

RING = "ring"
HALVES = "exchange of halves (the same as ring and Rabenseifner on 2 ranks)"

# The pieces that each rank added, by rank: [elements, mask of ranks in a, mask of ranks in b].
Trace = Sequence[Sequence[Sequence[int]]]


def name_algorithm(trace: Trace, elements: int) -> str:
    """Name the all-reduce algorithm that adds in these pieces.

    The names are those of Thakur, Rabenseifner and Gropp, Optimization of Collective Communication
    Operations in MPICH (2005). They differ in the number of elements whose final sum each rank
    computes, and in whether partial sums are added to single contributions or to each other.
    """
    ranks = len(trace)
    everyone = (1 << ranks) - 1
    finished = [
        sum(count for count, a, b in pieces if a | b == everyone and a != b) for pieces in trace
    ]
    if all(count == elements for count in finished):
        return "recursive doubling"
    if sorted(finished) == [0] * (ranks - 1) + [elements]:
        return "reduce to one rank, then broadcast"
    share = -(-elements // ranks)
    if sum(finished) != elements or max(finished) > share:
        return "an unknown algorithm"
    if ranks == 2:
        return HALVES
    one_by_one = all(
        min(a.bit_count(), b.bit_count()) == 1 for pieces in trace for _, a, b in pieces
    )
    if not one_by_one:
        return "Rabenseifner (recursive halving)"
    whole = all(len(pieces) == ranks - 1 for pieces in trace)
    return RING if whole else f"{RING} in segments"


def allreduce_checks(answer: Answer, horovod_loads: bool) -> list[Check]:
    """Return the checks of the probe `allreduce`, which summed 1 MB with both libraries."""
    name, facts = "all-reduce", answer.facts
    if "size" not in facts:
        cure = "run hvdtrain setup, which binds launcher, mpi4py and Horovod to one MPI"
        return [Check(name, "fault", f"2 ranks did not start: {answer.reason}", cure)]
    if facts["size"] != 2:
        text = f"the launcher started 2 ranks, but MPI sees {facts['size']}"
        return [Check(name, "fault", text, "use the launcher of the MPI that mpi4py loads")]
    checks = [_sum_check("all-reduce by mpi4py", "mpi", answer)]
    if not horovod_loads:
        text = "not tried, since Horovod cannot be loaded"
        return [*checks, Check("all-reduce by Horovod", "note", text)]
    checks.append(_sum_check("all-reduce by Horovod", "horovod", answer))
    if checks[-1].state == "ok":
        text, cure = f"did not work: {answer.reason or 'a wrong sum'}", "run hvdtrain setup"
        check = Check(
            "process sets", "fault", text, f"unset HOROVOD_DYNAMIC_PROCESS_SETS, then {cure}"
        )
        if facts.get("process_sets_right"):
            text = "a set was added for each of 2 ranks and gave correct sums"
            check = Check("process sets", "ok", text)
        checks.append(check)
    return checks


def algorithm_check(
    pair: Answer, automatic: Answer, ring: Answer, library: str, chosen_by_user: Sequence[str]
) -> Check:
    """Return which algorithm the MPI library uses, and whether `--allreduce ring` is honoured.

    Args:
        pair: the probe `allreduce` on 2 ranks.
        automatic: the probe `reductions auto` on 4 ranks.
        ring: the probe `reductions ring` on 4 ranks.
        library: name of the MPI library.
        chosen_by_user: variables in the user's environment that tune it.
    """
    name = "all-reduce algorithm"
    for answer in (automatic, ring):
        if any(str(size) not in answer.facts for size in WATCHED_SIZES):
            return Check(name, "note", f"not known: 4 ranks did not run: {answer.reason}")
    by_size = {size: _name(automatic.facts[str(size)], size) for size in WATCHED_SIZES}
    component = chosen_component(automatic.errors)
    chooser = f"{library}{f' (component {component})' if component else ''}"
    by = f"from {', '.join(chosen_by_user)}" if chosen_by_user else "by size and ranks"
    parts = [f"auto, chosen by {chooser} {by}: 4 ranks, {_spell(by_size)}"]
    if "trace" in pair.facts:
        parts.append(f"2 ranks, 1 MB: {name_algorithm(pair.facts['trace'], 2**17)}")
    ring_by_size = {size: _name(ring.facts[str(size)], size) for size in WATCHED_SIZES}
    differing = all(ring.facts[str(size)]["sums"] > 1 for size in WATCHED_SIZES)
    if all(algorithm.startswith(RING) for algorithm in ring_by_size.values()) and differing:
        parts.append("--allreduce ring gives ring at every size")
        return Check(name, "ok", "; ".join(parts))
    parts.append(f"--allreduce ring is NOT honoured: {_spell(ring_by_size)}")
    cure = f"unset {' '.join(chosen_by_user)}" if chosen_by_user else "use --allreduce auto"
    return Check(name, "note", "; ".join(parts), cure)


def chosen_component(errors: str) -> str:
    """Return Open MPI's collective component of MPI_COMM_WORLD: the last one that its log enables.

    Components are enabled in the order of their priority, and each overrides the ones before it.
    """
    component = ""
    for line in errors.splitlines():
        if "new communicator" in line and "MPI_COMM_WORLD" not in line:
            break
        words = line.replace(",", " ").split()
        if "coll:base:comm_select:" in words and words[-1] == "Enabled":
            component = words[words.index("selecting") + 1]
    return component


def _sum_check(name: str, library: str, answer: Answer) -> Check:
    right = answer.facts.get(f"{library}_right")
    if right is None:
        cure = "run hvdtrain setup"
        return Check(name, "fault", f"failed on 2 ranks: {answer.reason}", cure)
    if not right:
        text = "1 MB on 2 ranks gave a WRONG sum"
        cure = "do not train on this machine, and report it with the output of doctor --json"
        return Check(name, "fault", text, cure)
    milliseconds = answer.facts[f"{library}_milliseconds"]
    return Check(name, "ok", f"1 MB of float32 on 2 ranks: correct, {milliseconds:.2f} ms")


def _name(watched: Mapping[str, Any], size: int) -> str:
    return name_algorithm(watched["trace"], size // 8)


def _spell(by_size: Mapping[int, str]) -> str:
    """Return text such as `8 KB: a, 1 MB and 16 MB: b` for algorithms by size in bytes."""
    groups = groupby(by_size.items(), key=lambda item: item[1])
    return ", ".join(
        f"{' and '.join(_size(size) for size, _ in items)}: {name}" for name, items in groups
    )


def _size(size: int) -> str:
    return f"{size >> 20} MB" if size >= 2**20 else f"{size >> 10} KB"
