"""What a job asks for."""

import pytest

from hvdtrain.config import TrainConfig
from hvdtrain.errors import UsageError
from hvdtrain.jobs.options import JobOptions

RUN = TrainConfig(model="cnn", data="d", ranks=4)


@pytest.mark.parametrize(
    ("text", "minutes"),
    [("90", 90), ("1:30:00", 90), ("0:00:01", 1), ("2-01:00:30", 2941), ("24:00:00", 1440)],
)
def test_times_are_those_of_sbatch(text: str, minutes: int) -> None:
    assert JobOptions(time=text).minutes() == minutes


@pytest.mark.parametrize("text", ["", "soon", "-5", "1:30", "0", "1:2:3:4", "0:00:00"])
def test_other_times_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match="--time"):
        JobOptions(time=text).minutes()


def test_ranks_are_spread_over_nodes() -> None:
    assert JobOptions(nodes=2).ranks_per_node(RUN) == 2
    assert JobOptions(nodes=2, gpus_per_node=2).ranks_per_node(RUN) == 2
    assert JobOptions().ranks_per_node(TrainConfig(model="cnn", data="d")) == 1


@pytest.mark.parametrize(
    ("job", "reason"),
    [
        (JobOptions(nodes=3), "cannot be spread evenly"),
        (JobOptions(nodes=2, gpus_per_node=4), "make them equal"),
        (JobOptions(nodes=0), "--nodes must be above 0"),
        (JobOptions(cpus_per_rank=0), "--cpus-per-rank must be above 0"),
        (JobOptions(nodes=2, cluster="local"), "is one machine"),
    ],
)
def test_what_cannot_be_is_refused(job: JobOptions, reason: str) -> None:
    with pytest.raises(UsageError, match=reason):
        job.ranks_per_node(RUN)
