"""Plans for tests: the known pipelines, and any plan at all."""

from hypothesis import strategies as st

from hvdtrain.parallel.plan import SCHEDULES, Plan, Stage, pipeline

Case = tuple[Plan, int]  # a plan and a batch size


def a_pipeline(schedule: str, ranks: int, microbatches: int, chunks: int = 0) -> Plan:
    """Stages of one rank each; under the interleaved schedule, by default, two a rank."""
    stages = ranks * (chunks or (2 if schedule == "interleaved" else 1))
    names = [f"layer{i}" for i in range(stages)]
    return pipeline(names, [1.0] * stages, ranks, stages, 1, microbatches, schedule)


def a_plan(*ranks: tuple[int, ...], microbatches: int, schedule: str = "1f1b") -> Plan:
    """A stage for each tuple of ranks; replicas share equally."""
    stages = (Stage((f"layer{i}",), held, (1,) * len(held)) for i, held in enumerate(ranks))
    return Plan(tuple(stages), microbatches, schedule)


@st.composite
def plans(draw: st.DrawFn, max_stages: int = 5, max_ranks: int = 5, max_m: int = 8) -> Plan:
    """Replicas equal or not, shares unequal or zero, ranks with one stage or several or all."""
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


# Batches too small for all micro-batches and replicas among them.
cases: st.SearchStrategy[Case] = st.tuples(plans(), st.integers(1, 100))
