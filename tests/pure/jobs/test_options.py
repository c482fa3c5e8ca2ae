"""Options of a job."""

import subprocess
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from hvdtrain.config import TrainConfig
from hvdtrain.errors import UsageError
from hvdtrain.jobs.options import (
    SBATCH_OPTIONS,
    VARIABLE,
    JobOptions,
    Site,
    SlurmOptions,
    load_site,
    sbatch_parameters,
)
from tests.conftest import ROOT

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


def test_the_example_is_one() -> None:
    site = load_site(str(ROOT / "slurm" / "sites" / "example.yaml"))
    assert site.partition == "gpu"
    assert site.setup == ["module load python openmpi"]
    assert site.options["mail-type"] == "END,FAIL"


def test_without_a_file_there_is_a_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    assert load_site(None) == Site()


def test_a_variable_names_the_default_site(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, other = tmp_path / "ours.yaml", tmp_path / "other.yaml"
    ours.write_text("account: 12345\n")
    other.write_text("account: physics\n")
    monkeypatch.setenv(VARIABLE, str(ours))
    assert load_site(None).account == "12345"
    assert load_site(str(other)).account == "physics"
    monkeypatch.setenv(VARIABLE, "")
    assert load_site(None) == Site()
    monkeypatch.setenv(VARIABLE, str(tmp_path / "absent.yaml"))
    with pytest.raises(UsageError) as caught:
        load_site(None)
    message = str(caught.value)
    assert message.startswith(f"HVDTRAIN_SITE names {tmp_path}/absent.yaml, which is not a file")
    assert load_site(str(other)).account == "physics"


@pytest.mark.parametrize("path", ["/nowhere", "/", ""])
def test_a_site_that_is_not_a_file_is_refused(path: str) -> None:
    with pytest.raises(UsageError, match=r"--site names .*, which is not a file: correct it or"):
        load_site(path)


@pytest.mark.parametrize("number", ["007", "010", "0123456"])
def test_an_account_keeps_its_leading_zeros(tmp_path: Path, number: str) -> None:
    """YAML 1.1 reads 010 as 8."""
    path = tmp_path / "site.yaml"
    path.write_text(f"account: {number}\n")
    assert load_site(str(path)).account == number


def test_options_of_a_site_are_those_of_the_file_in_time_too(tmp_path: Path) -> None:
    """YAML 1.1 reads 1:00:00 as 3600, so a minimum of one hour became 3600 minutes."""
    path = tmp_path / "site.yaml"
    path.write_text("options: {time-min: 1:00:00, deadline: now+1hour}\n")
    assert load_site(str(path)).options == {"time-min": "1:00:00", "deadline": "now+1hour"}


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("partiton: gpu", "unknown key partiton; did you mean partition"),
        ("requeue: 'no'", "requeue must be true or false, not 'no'"),
        ("setup: module load mpi", "setup must be a list of lines"),
        ("warning_seconds: true", "warning_seconds must be a number"),
        ("options: [a]", "options must be keys and values"),
        ("- a", "is not a description of a site"),
        ("a: [", "cannot be read as YAML"),
    ],
)
def test_mistakes_are_named(tmp_path: Path, text: str, reason: str) -> None:
    path = tmp_path / "site.yaml"
    path.write_text(text)
    with pytest.raises(UsageError, match=reason.replace("?", r"\?").replace("[", r"\[")):
        load_site(str(path))


@settings(max_examples=200, deadline=None)
@given(text=st.text(max_size=80) | st.dictionaries(st.text(), st.text()).map(str))
@example(text='{"\\n"}')  # this key broke the line of the message
def test_any_text_is_a_site_or_refused(
    tmp_path_factory: pytest.TempPathFactory, text: str
) -> None:
    path = tmp_path_factory.getbasetemp() / "any-site.yaml"
    path.write_bytes(text.encode(errors="surrogatepass"))
    try:
        assert isinstance(load_site(str(path)), Site)
    except UsageError as error:
        assert "\n" not in str(error)


@pytest.mark.parametrize(
    ("gpus", "option", "value"),
    [
        ("gpus-per-node", "gpus-per-node", "2"),
        ("gpus-per-node:a100", "gpus-per-node", "a100:2"),
        ("gres", "gres", "gpu:2"),
        ("gres:v100", "gres", "gpu:v100:2"),
    ],
)
def test_gpus_are_asked_for_as_the_site_wants(gpus: str, option: str, value: str) -> None:
    values = sbatch_parameters(JobOptions(gpus_per_node=2), Site(gpus=gpus), 2, "name")
    assert values["additional_parameters"] == {"requeue": True, option: value}


def test_each_option_of_the_table_overrides_the_site() -> None:
    site: dict[str, Any] = dict.fromkeys(SBATCH_OPTIONS, "of the site")
    for name in SBATCH_OPTIONS:
        job: dict[str, Any] = {name: "16G"}
        values = sbatch_parameters(JobOptions(**job), Site(**site), 1, "name")
        assert {key: values[key] for key in SBATCH_OPTIONS} == site | job
        # A site's file may have it among its further options.
        values = sbatch_parameters(JobOptions(**job), Site(options={name: "x"}), 1, "name")
        assert (values[name], values["additional_parameters"]) == ("16G", {"requeue": True})


def test_memory_per_cpu_takes_the_place_of_the_site_s_memory() -> None:
    """sbatch refuses a job with both."""
    job = JobOptions(sbatch=["mem-per-cpu=2G"])
    for site in (Site(mem="8G"), Site(options={"mem": "8G"}), Site(options={"mem-per-gpu": "8G"})):
        values = sbatch_parameters(job, site, 1, "name")
        assert "mem" not in values
        assert values["additional_parameters"] == {"requeue": True, "mem-per-cpu": "2G"}
    site = Site(options={"mem-per-cpu": "2G"})
    values = sbatch_parameters(JobOptions(mem="4G"), site, 1, "name")
    assert (values["mem"], values["additional_parameters"]) == ("4G", {"requeue": True})


def test_further_options_of_the_command_line_come_last() -> None:
    site = Site(options={"exclusive": "user", "hold": True})
    values = sbatch_parameters(JobOptions(sbatch=["exclusive", "mail-type=END"]), site, 1, "name")
    assert values["additional_parameters"] == {
        "requeue": True,
        "hold": True,
        "exclusive": True,
        "mail-type": "END",
    }


@pytest.mark.parametrize(
    ("array", "number"),
    [({}, "7"), ({"SLURM_ARRAY_JOB_ID": "5", "SLURM_ARRAY_TASK_ID": "2"}, "5_2")],
)
def test_a_job_requeues_itself_and_not_its_siblings(array: dict[str, str], number: str) -> None:
    teardown = sbatch_parameters(JobOptions(), Site(), 1, "name")["teardown"]
    done = subprocess.run(
        ["bash", "-c", "\n".join(["scontrol() { echo $*; false; }", "(exit 75)", *teardown])],
        env={"SLURM_JOB_ID": "7"} | array,
        capture_output=True,
        text=True,
    )
    assert (done.stdout, done.returncode) == (f"requeue {number}\n", 75)


def test_the_command_line_wins_over_the_site() -> None:
    site = Site(partition="low", account="a", options={"exclusive": "user"}, requeue=False)
    values = sbatch_parameters(JobOptions(partition="high"), site, 1, "name")
    assert (values["partition"], values["account"]) == ("high", "a")
    assert values["additional_parameters"] == {"no-requeue": True, "exclusive": "user"}
    assert not any("requeue" in line for line in values["teardown"])
