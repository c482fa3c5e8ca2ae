"""The dilation of an emulation, and the seconds of its components during events."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from hvdtrain import emulate as emulations
from hvdtrain import models
from hvdtrain.config import TrainConfig
from hvdtrain.emulate import Clock, Emulation, Hardware
from hvdtrain.errors import UsageError
from hvdtrain.models.component import build_component
from hvdtrain.models.costs import component_costs
from hvdtrain.plan.plan import pipeline, replicated
from hvdtrain.planner.clusters import load, question_of
from hvdtrain.planner.network import Contention, Curve, Line, MeasuredNetwork
from hvdtrain.planner.profilefile import save
from hvdtrain.world import World
from tests.pure.planner.test_clusters import costs_of


def emulation(dilation: float, ranks: int = 2) -> Emulation:
    cluster, costs = load("8-v100", ranks), costs_of("resnet50")
    hardware = Hardware.of_cluster(cluster, 0, Clock(dilation))
    return Emulation("8-v100", hardware, question_of(cluster, costs, 64, "sgd"), [])


def test_a_low_dilation_is_reported_with_a_sufficient_one() -> None:
    plan = replicated([cost.name for cost in costs_of("resnet50")], 2, None, None)
    enough = emulation(1).sufficient_dilation(plan)
    assert enough > 2
    assert emulation(enough).remarks(plan, is_chosen=False) == []
    (line,) = emulation(enough / 10).remarks(plan, is_chosen=False)
    assert f"with {enough:g} it adds 3%" in line
    assert "adds about 30% to a step" in line


@pytest.mark.parametrize("ranks", [4, 8])
def test_more_ranks_on_the_same_cores_need_a_larger_dilation(ranks: int) -> None:
    costs = costs_of("resnet50")
    names, work = [cost.name for cost in costs], [cost.forward_flops for cost in costs]

    def enough(number: int) -> float:
        plan = pipeline(names, work, number, number, 1, None, "1f1b")
        return emulation(1, number).sufficient_dilation(plan)

    assert enough(ranks) > enough(ranks // 2)


@pytest.mark.parametrize(("step", "factor"), [(1, 3.0), (4, 3.0), (5, 1.0)])
def test_an_event_slows_a_component_once_and_ends(
    tmp_path: Path, step: int, factor: float
) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text(
        "{ranks: 1, ranks_per_node: 1, gflops: 1, memory_gbytes: 20, memory_gib: 16, gbytes: 1, "
        "events: [{slows: devices, factor: 3, ranks: [0], to_step: 5}]}"
    )
    config = TrainConfig(model="cnn", data="", batch_size=8, emulate=f"{file}:1e-3")
    parts = models.components("cnn", 10, 32)
    costs = component_costs(parts, 32, classes=10)
    made = emulations.emulation(config, parts, costs, (), 32, World("none", 0, 1, 0, 1, 1))
    made.hardware.step = lambda: step
    module = build_component(made.components[0], 0)
    module(torch.zeros(8, 3, 32, 32))
    undisturbed = replace(load(str(file)), events=()).profile(costs, 1).ranks[0]
    seconds = undisturbed.components["conv1"].forward(8)
    assert made.clock.slept == pytest.approx(factor * 1e-3 * seconds)
    simulated = made.question.known.profile.ranks[0].components["conv1"].forward(8)
    assert simulated == pytest.approx(3 * seconds)  # of the first step


@pytest.mark.proves(
    "`--emulate FILE.json` emulates the ranks of a profile, and refuses one of another "
    "model or number of ranks."
)
def test_a_profile_emulates_the_ranks_that_it_was_measured_on(tmp_path: Path) -> None:
    file = tmp_path / "profile.json"
    parts = models.components("cnn", 10, 32)
    costs = component_costs(parts, 32, classes=10)
    modelled = load("8-v100", 2).profile(costs, 1)
    slow = modelled.scaled([1, 3])
    free = Curve.straight(Line(0.0, 1e-9), 1e9)
    network = MeasuredNetwork(("here",) * 2, {False: {2: free}}, {False: free}, Contention(2, 1))
    save(
        file, "cnn, 10 classes, 32 px, 64 images, fp32, adam, all-reduce auto, cpu", slow, network
    )
    config = TrainConfig(model="cnn", data="", batch_size=8, emulate=f"{file}:1")
    emulated = [
        emulations.emulation(config, parts, costs, (), 32, World("none", rank, 2, rank, 2, 1))
        for rank in range(2)
    ]
    for rank, one in enumerate(emulated):
        build_component(one.components[0], 0)(torch.zeros(8, 3, 32, 32))
        expected = slow.ranks[rank].components["conv1"].forward(8)
        assert one.clock.slept == pytest.approx(expected)
        assert one.hardware.network.send_seconds(0, 1, 1e6) == pytest.approx(1e-3)
        assert one.hardware.network.contention == (2, 1)
    with pytest.raises(UsageError, match=r"a profile of other settings \(cnn, 10 classes, 32 px"):
        emulations.emulation(config, parts, costs, (), 64, World("none", 0, 2, 0, 2, 1))
    with pytest.raises(UsageError, match=r"a profile of other settings \(.*, fp32, adam, "):
        other = replace(config, optimizer="sgd")
        emulations.emulation(other, parts, costs, (), 32, World("none", 0, 2, 0, 2, 1))
    with pytest.raises(UsageError, match=r"it has 2 rank\(s\), the job has 1"):
        emulations.emulation(config, parts, costs, (), 32, World("none", 0, 1, 0, 1, 1))
