"""Users' files give a valid result or an error of one line, quickly, whatever they hold."""

import json
import math
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import example, given, reject, settings
from hypothesis import strategies as st

from hvdtrain import cli
from hvdtrain.checkpoint import store
from hvdtrain.checkpoint import tensorfile as formats
from hvdtrain.checkpoint.tensorfile import Entry, Manifest, read_manifest
from hvdtrain.config import TrainConfig
from hvdtrain.engine.progress import Progress
from hvdtrain.errors import DataError, UsageError
from hvdtrain.host import records
from hvdtrain.jobs import options, sweep, watch
from hvdtrain.plan import plan as plans
from hvdtrain.planner import clusters
from hvdtrain.study import results, series
from hvdtrain.training import run
from tests import hostile
from tests.pure.jobs.test_watch import RECORD
from tests.pure.study.test_results import write_run

PARSER = cli._parser()
NAMES = ["stem", "body", "neck", "head"]
PLAN = {
    "stages": [
        {"components": ["stem", "body"], "ranks": [0, 1], "shares": [2, 1]},
        {"components": ["neck", "head"], "ranks": [2], "shares": [1]},
    ],
    "microbatches": 4,
    "schedule": "1f1b",
}
CONFIG = asdict(TrainConfig(model="cnn", data="data", lr=0.1, epochs=3, inject="kill step=3"))
PROGRESS = asdict(Progress("0" * 64)) | {"metrics_bytes": 5, "ledger": "/x", "ledger_bytes": 5}
PART = Entry("part-0000.safetensors", 100, "0" * 64)
MANIFEST: dict[str, Any] = json.loads(Manifest((PART,), PROGRESS, {"model": "cnn"}).to_json())


CLUSTER = {
    name: value for name, value in asdict(clusters.PRESETS["16-cpu-10g"]).items() if value
} | {"ranks_per_node": 4}
SITE = {"partition": "low", "gpus": "gres:a100", "requeue": True, "warning_seconds": 180}
SITE |= {"setup": ["module load mpi"], "options": {"mem": "8G", "exclusive": True}}
STUDY = {"model": "cnn", "data": "data", "ranks": [1, 2], "lr": 0.1, "repeats": 2, "time": "30:00"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder in which each example overwrites the file of the one before."""
    return tmp_path_factory.mktemp("hostile")


@given(st.sampled_from(hostile.paths_of(PLAN)), hostile.VALUES)
def test_a_plan_file_is_a_plan_of_the_model_or_one_line(
    folder: Path, path: tuple[Any, ...], to: object
) -> None:
    file = folder / "plan.json"
    file.write_text(json.dumps(hostile.changed(PLAN, path, to)))

    def parse() -> plans.Plan:
        plan = plans.parse_plan(str(file), NAMES, 3)
        plans.check(plan, NAMES, 3, lambda: "")
        return plan

    if (plan := hostile.understood(parse)) is not None:
        assert [name for stage in plan.stages for name in stage.components] == NAMES
        assert set(plan.ranks) == {0, 1, 2}


@given(st.sampled_from(sorted(CLUSTER)), hostile.VALUES)
def test_a_cluster_file_gives_finite_times_or_one_line(folder: Path, key: str, to: object) -> None:
    file = folder / "cluster.yaml"
    file.write_text(yaml.safe_dump(CLUSTER | {key: to}))
    network = hostile.understood(lambda: clusters.ClusterNetwork(clusters.load(str(file))))
    if network is not None:
        ranks = range(network.cluster.ranks)
        assert math.isfinite(network.reduce_seconds(ranks, 1e9))
        assert math.isfinite(network.send_seconds(0, ranks[-1], 1e9))
        assert math.isfinite(1e9 / (1e9 * network.cluster.gflops))


@example(("partition",), {"\n": 2**63})
@given(st.sampled_from(hostile.paths_of(SITE)), hostile.VALUES)
def test_a_file_of_a_site_is_one_or_one_line(
    folder: Path, path: tuple[Any, ...], to: object
) -> None:
    file = folder / "site.yaml"
    file.write_text(yaml.safe_dump(hostile.changed(SITE, path, to)))
    loaded = hostile.understood(lambda: options.load_site(str(file)))
    assert loaded is None or abs(loaded.warning_seconds) < 2**63


@given(st.sampled_from(hostile.paths_of(STUDY)), hostile.VALUES)
def test_a_file_of_a_study_is_one_or_one_line(
    folder: Path, path: tuple[Any, ...], to: object
) -> None:
    file = folder / "study.yaml"
    file.write_text(yaml.safe_dump(hostile.changed(STUDY, path, to)))
    loaded = hostile.understood(lambda: sweep.load(str(file), "runs"))
    assert loaded is None or 0 < len(loaded.cells) <= sweep.MOST_RUNS


@pytest.mark.proves(
    "A file of a user, whatever it holds, is understood or refused in one line, in "
    "bounded memory and time."
)
@pytest.mark.parametrize(
    ("text", "message"),
    [
        (json.dumps({str(number): 1 for number in range(20_000)}), "unknown key 0"),
        (json.dumps({"k" * 10**6: 1}), "unknown key kkk"),
        ('{"stages": [' + '{"ranks": [0]},' * 2**19 + "]}", "larger than 4,194,304 bytes"),
        ('{"stages": ' + "[" * 10**5, "too deeply"),
        ('{"stages": [{"ranks": [1e400]}]}', "must be a finite number, not inf"),
        (
            f'{{"stages": [{{"ranks": [0]}}], "microbatches": {10**400}}}',
            "is too large, with 1329",
        ),
    ],
)
def test_a_plan_file_made_to_harm_is_refused_soon(tmp_path: Path, text: str, message: str) -> None:
    """The check of 20,000 keys must not compare each with all the others."""
    file = tmp_path / "plan.json"
    file.write_text(text)
    start = time.process_time()
    with pytest.raises(UsageError, match=message) as caught:
        plans.parse_plan(str(file), NAMES, 3)
    assert time.process_time() - start < 2
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 500


@settings(deadline=None)  # the parser is slow
@given(st.sampled_from(sorted(CONFIG)), hostile.VALUES)
def test_a_configuration_is_in_range_or_one_line(folder: Path, key: str, to: object) -> None:
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(CONFIG | {key: to}))

    def parse() -> TrainConfig:
        parsed = PARSER.parse_args(["train", "--config", str(path)])
        values = {name: parsed["train"][name] for name in CONFIG}
        return TrainConfig(**values).check()

    if (config := hostile.understood(parse)) is not None:
        assert 0 < config.batch_size < 2**63
        assert 0 < config.lr < math.inf
        assert 0 <= config.seed < 2**63


@pytest.mark.parametrize(
    "content",
    [
        b"\xff\xfe\x00\x01",
        b"[" * 60_000,
        b"x: 1\n" * 20_000,
        b"model: &a [cnn]\ndata: *a\n",
        "".join(f"{' ' * depth}a:\n" for depth in range(100)).encode(),
        b"model: !!python/object/apply:os.system ['touch harmed']\n",
        b"model: cnn\nlr: 0x" + b"1" * 6000 + b"\n",
        b"- model\n- cnn\n",
        b"",
    ],
)
def test_a_configuration_made_to_harm_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.yaml").write_bytes(content)
    with pytest.raises(UsageError) as caught:
        cli.run(["train", "--config", "config.yaml"])
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 500
    assert not (tmp_path / "harmed").exists()


@given(st.sampled_from(hostile.paths_of(MANIFEST)), hostile.VALUES, st.booleans())
@example(("format_version",), 10**450, False)
def test_a_manifest_is_one_or_one_line(
    folder: Path, path: tuple[Any, ...], to: object, signs: bool
) -> None:
    content = hostile.changed(MANIFEST, path, to)
    if signs:  # as an attacker would
        unsigned = {key: content[key] for key in content if key != "sha256"}
        try:
            content["sha256"] = formats._digest(unsigned)
        except ValueError:
            reject()  # no JSON has such a number
    (folder / formats.MANIFEST).write_text(json.dumps(content))

    def read() -> Manifest:
        loaded = read_manifest(folder)
        Progress.of(loaded.progress)
        return loaded

    if (loaded := hostile.understood(read, DataError)) is not None:
        assert all(0 <= part.bytes < 2**63 for part in loaded.parts)
        assert all("/" not in part.name for part in loaded.parts)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder of three finished runs, which are jobs; examples change `bad`."""
    folder = tmp_path_factory.mktemp("runs")
    host = {"host": "a", "seconds": 60.0, "joules": {"RAPL": {"package": 9.0}}, "missing": []}
    shared: dict[str, Any] = {"host": "a", "cores": 2, "other_cores": 0.5, "stolen_cores": 0.0}
    shared["throttled_fraction"] = 0.1
    for name, ranks in (("bad", 2), ("one", 1), ("two", 2)):
        counts: dict[str, Any] = {"energy": [host], "disturbance": [shared]}
        counts["agreement"] = {"sync": "exact", "sent_bytes_per_step": 5.0}
        run = write_run(folder / name, ranks, 100 / ranks, [5.0] * ranks, **counts)
        watch.write(run, RECORD)
        (run / "heartbeats").mkdir()
        (run / "heartbeats" / "rank-0000.json").write_text('{"time": 5, "pid": 1}')
        (run / "checkpoints").mkdir()
        (run / "checkpoints" / "best.json").write_text(
            '{"checkpoint": "step-00000001", "metric": "val_accuracy", "value": 0.5}'
        )
        (run / "inputs.json").write_text(json.dumps(INPUTS))
    return folder


INPUTS = asdict(run.Inputs(8, 8, None, ("a", "b"), (0.5,) * 3, (0.5,) * 3))
RECORDS = (
    *("summary.json", "metrics.jsonl", "config.yaml", "job.json", "inputs.json"),
    *("checkpoints/best.json", "heartbeats/rank-0000.json"),
)


def documents(text: str, name: str) -> Any:
    """Return the content of a record, a list if it has a record per line."""
    if name.endswith(".jsonl"):
        return [json.loads(line) for line in text.splitlines()]
    return yaml.safe_load(text)


def as_text(content: Any, name: str) -> str:
    if name.endswith(".yaml"):
        return yaml.safe_dump(content)
    return (
        "".join(f"{json.dumps(x)}\n" for x in content) if "jsonl" in name else json.dumps(content)
    )


def check_other_runs(runs: Path) -> None:
    """Read all runs: the bad one is read or named with its fault, and the others are read."""
    finished, left_out = results.find([str(runs)])
    all_series, without = series.arrange(finished)
    assert {"one", "two"} <= {run.name for one in all_series for run in one.runs}
    faults = [line for line in (*left_out, *without) if line.startswith("bad")]
    assert faults or "bad" in {run.name for run in finished}
    assert all("\n" not in line and len(line) < 900 for line in faults)
    rows = watch.rows(*watch.runs_of([str(runs)]))
    assert [Path(row.run).name for row in rows] == ["bad", "one", "two"]
    assert [row.epoch for row in rows[1:]] == [1, 1]
    assert len(watch.as_text(rows).splitlines()) >= 4
    hostile.understood(lambda: run.load_inputs(runs / "bad"), DataError)
    hostile.understood(lambda: store.best(runs / "bad" / "checkpoints"), DataError)


@pytest.mark.proves(
    "A damaged or strange record of a run is a row of `report` and `jobs status`; names "
    "are text in reports."
)
@settings(max_examples=50)
@given(st.data())
def test_a_bad_record_of_a_run_is_a_row_that_says_so(runs: Path, draw: st.DataObject) -> None:
    name = draw.draw(st.sampled_from(RECORDS))
    path = runs / "bad" / name
    before = path.read_text()
    content = documents(before, name)
    place = draw.draw(st.sampled_from(hostile.paths_of(content)))
    path.write_text(as_text(hostile.changed(content, place, draw.draw(hostile.VALUES)), name))
    try:
        check_other_runs(runs)
    finally:
        path.write_text(before)


@pytest.mark.parametrize("name", RECORDS)
def test_a_record_that_is_no_record_at_all_is_a_row_that_says_so(runs: Path, name: str) -> None:
    path = runs / "bad" / name
    before = path.read_bytes()
    ranks = b'{"ranks": [' + b"0," * 10**6 + b"0]}"
    for content in (b"", b"\xff\xfe", b"null", b"[" * 10**5, ranks, b"[]\n{}\n", b"0" * 10**5):
        path.write_bytes(content)
        check_other_runs(runs)
    secret = runs.with_name(f"{runs.name}-secret")
    secret.write_bytes(before)
    path.unlink()
    path.symlink_to(secret)
    check_other_runs(runs)
    assert records.content(path) == before  # data sets and runs may be links to a store
    path.unlink()
    path.mkdir()
    check_other_runs(runs)
    path.rmdir()
    with hostile.fifo(path):
        check_other_runs(runs)
        with pytest.raises(OSError, match="it is not a regular file"):  # nor was it waited for
            records.content(path)
    path.unlink()
    path.write_bytes(before)
