"""slurm/local: a real Slurm that starts and stops without leaving anything behind."""

import subprocess
import tempfile
from pathlib import Path

from tests.slurm.cluster import LOCAL, Cluster


def test_there_are_four_nodes_with_names_memory_and_gpus_of_their_own(cluster: Cluster) -> None:
    shown = cluster.run("srun", "--nodes=4", "--gpus-per-node=2", "sh", "-c", _SHOW)
    nodes = [line.split() for line in shown.splitlines()]
    assert sorted(host for host, _, _ in nodes) == ["n1", "n2", "n3", "n4"]
    assert {gpus for _, _, gpus in nodes} == {"0,1"}
    assert len({device for _, device, _ in nodes}) == 4


_SHOW = "echo $(hostname) $(stat --format %d /dev/shm) $CUDA_VISIBLE_DEVICES"


def test_starting_it_again_changes_nothing(cluster: Cluster) -> None:
    before = (cluster.folder / "pid").read_text()
    cluster.run(LOCAL / "up", cluster.folder)
    assert (cluster.folder / "pid").read_text() == before


def test_nothing_is_left_of_it_and_its_jobs(own_cluster: Cluster) -> None:
    own_cluster.run("srun", "--nodes=2", "true")
    own_cluster.submit("--nodes=2", "--wrap", "srun sleep 86399")
    assert own_cluster.processes("slurmd")
    own_cluster.run(LOCAL / "down", own_cluster.folder)
    assert not own_cluster.processes("")
    assert not own_cluster.folder.exists()
    assert str(own_cluster.folder) not in Path("/proc/mounts").read_text()
    own_cluster.run(LOCAL / "up", own_cluster.folder)


def test_a_folder_that_holds_something_else_is_refused(cluster: Cluster) -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        configuration = Path(folder) / "slurm.conf"
        configuration.write_text("ClusterName=campus\n")
        for command in ("up", "down"):
            done = subprocess.run([LOCAL / command, folder], capture_output=True, text=True)
            assert (done.returncode, len(done.stderr.splitlines())) == (2, 1)
        assert configuration.read_text() == "ClusterName=campus\n"
