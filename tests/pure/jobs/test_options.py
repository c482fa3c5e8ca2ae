"""Options of a job."""

from typing import Any

import pytest

from hvdtrain.config import TrainConfig
from hvdtrain.errors import UsageError
from hvdtrain.jobs.options import SBATCH_OPTIONS, JobOptions, SlurmOptions

RUN = TrainConfig(model="cnn", data="d", ranks=4)


@pytest.mark.parametrize(("time", "minutes"), [("90", 90), (90, 90), ("1-12:30", 2190)])
def test_the_time_is_in_minutes(time: str | int, minutes: int) -> None:
    assert JobOptions(time=time).minutes() == minutes


@pytest.mark.parametrize("time", ["", "soon", -5, "0", "1:2:3:4", "0:00:00"])
def test_other_times_are_refused(time: str | int) -> None:
    with pytest.raises(UsageError, match="--time"):
        JobOptions(time=time).minutes()


def test_a_time_without_a_value_is_named() -> None:
    no_value: Any = None
    with pytest.raises(UsageError, match="--time needs a value: give minutes"):
        JobOptions(time=no_value).minutes()


def test_further_options_of_sbatch_are_names_with_or_without_a_value() -> None:
    job = JobOptions(sbatch=["exclusive", "--mail-type=END,FAIL", "comment=a = b"])
    assert job.sbatch_options() == {
        "exclusive": True,
        "mail-type": "END,FAIL",
        "comment": "a = b",
    }


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("mail-type END", "repeat --sbatch for another option"),
        ("exclusive --hold", "give NAME or NAME=VALUE"),
        ("-x node3", "is not understood"),
        ("", "is not understood"),
        ("partition=high", "use --partition"),
        ("--mem=4G", "use --mem"),
        ("cpus-per-task=2", "use --cpus-per-rank"),
        ("no-requeue", "use requeue in the site's file"),
        ("job-name=x", "use --run"),
        ("parsable", "--sbatch parsable is not possible: hvdtrain reads what sbatch prints"),
        ("wait", "sbatch would not return"),
        ("--test-only", "use --dry-run"),
        ("wrap=ls", "hvdtrain writes the script"),
        ("chdir=/tmp", "call hvdtrain in that folder"),
        ("hint=", "give a value on one line after hint=, or hint alone"),
        ("comment=a\n#SBATCH --wait", "give a value on one line"),
    ],
)
def test_what_is_no_further_option_of_sbatch_is_refused(text: str, reason: str) -> None:
    with pytest.raises(UsageError, match="--sbatch") as caught:
        JobOptions(sbatch=[text]).sbatch_options()
    assert reason in str(caught.value)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        *(({name: ""}, f"--{name} '' is not understood: give a value") for name in SBATCH_OPTIONS),
        ({"partition": "a\nb"}, r"--partition 'a\\nb' is not understood"),
        ({"mem": "16 G"}, "--mem 16 G is not understood: give megabytes"),
        ({"mem": "much"}, "--mem much is not understood: give megabytes"),
        ({"mem": -1}, "--mem -1 is not understood: give megabytes"),
        (
            {"mem": "4G", "sbatch": ["mem-per-cpu=1G"]},
            "--sbatch mem-per-cpu and --mem exclude each other: give one of them",
        ),
        ({"sbatch": ["mem-per-cpu=1G", "mem-per-gpu=1G"]}, "exclude each other"),
    ],
)
def test_wrong_values_for_sbatch_are_refused(options: dict[str, Any], reason: str) -> None:
    with pytest.raises(UsageError, match=reason) as caught:
        JobOptions(**options).sbatch_options()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("mem", [4000, "4000", "0", "16G", "1t"])
def test_memory_is_a_number_with_or_without_a_unit(mem: str | int) -> None:
    assert JobOptions(mem=mem).sbatch_options() == {}


def test_values_of_the_command_line_override_those_of_a_study() -> None:
    study = JobOptions(partition="low", qos="long", sbatch=["exclusive", "mail-type=END"])
    job = study.overridden_by(SlurmOptions(partition="high", sbatch=["mail-type=FAIL"]))
    assert (job.partition, job.qos) == ("high", "long")
    assert job.sbatch_options() == {"exclusive": True, "mail-type": "FAIL"}


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
