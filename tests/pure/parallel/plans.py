"""Plans for tests: pipelines, and strategies for arbitrary plans."""

from hypothesis import strategies as st

from hvdtrain.plan.plan import SCHEDULES, Plan, Stage, pipeline

Case = tuple[Plan, int]  # a plan and a batch size


def a_pipeline(schedule: str, ranks: int, microbatches: int, chunks: int = 0) -> Plan:
    """Return stages of one rank each; two per rank for the interleaved schedule by default."""
    stages = ranks * (chunks or (2 if schedule == "interleaved" else 1))
    names = [f"layer{i}" for i in range(stages)]
    return pipeline(names, [1.0] * stages, ranks, stages, 1, microbatches, schedule)


def a_plan(*ranks: tuple[int, ...], microbatches: int, schedule: str = "1f1b") -> Plan:
    """Return a plan with one stage per tuple of ranks and equal shares."""
    stages = (Stage((f"layer{i}",), held, (1,) * len(held)) for i, held in enumerate(ranks))
    return Plan(tuple(stages), microbatches, schedule)


@st.composite
def plans(draw: st.DrawFn, max_stages: int = 5, max_ranks: int = 5, max_m: int = 8) -> Plan:
    """Draw any plan: equal or unequal replicas, zero shares, ranks with one or more stages."""
    held = draw(
        st.lists(
            st.lists(st.integers(0, max_ranks - 1), min_size=1, max_size=3, unique=True),
            min_size=1,
            max_size=max_stages,
        )
    )
    number = {rank: i for i, rank in enumerate(sorted({rank for ranks in held for rank in ranks}))}
    stages = []
    for i, ranks in enumerate(held):
        size = len(ranks)
        shares = draw(st.lists(st.integers(0, 3), min_size=size, max_size=size).filter(any))
        stages.append(Stage((f"layer{i}",), tuple(number[r] for r in ranks), tuple(shares)))
    return Plan(tuple(stages), draw(st.integers(1, max_m)), draw(st.sampled_from(SCHEDULES)))


# Some batches are too small for all micro-batches and replicas.
cases: st.SearchStrategy[Case] = st.tuples(plans(), st.integers(1, 100))
