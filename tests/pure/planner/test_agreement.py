"""Predicted bytes and steps of each way to agree."""

from collections.abc import Mapping
from dataclasses import replace

import pytest

from hvdtrain.config import TrainConfig
from hvdtrain.options.requests import parse_sync_request
from hvdtrain.plan.plan import Plan, pipeline, replicated
from hvdtrain.plan.traffic import Gradient, Sizes
from hvdtrain.planner.agreement import (
    FREE,
    Agreement,
    Coding,
    agreement_of,
    rank_bytes,
    typical_coding,
)
from hvdtrain.planner.candidate import play
from hvdtrain.planner.cost import Known, Question
from hvdtrain.planner.solve import solve
from tests.pure.planner.machines import component, known, network

SIDE = 100  # a matrix of 10,000 values, 40,000 bytes
COMPUTED = 3.0 * 4  # forward and backward of 4 samples
PER_BYTE = 1e-4
NONE_FREE = {"bf16": Coding(0.5, 0.25), "fp16": Coding(0.5, 0.25), "powersgd:2": Coding(1.0, 0.5)}
ALL_FREE = dict.fromkeys([*NONE_FREE, "topk:0.01"], FREE)


def question(
    coding: Mapping[str, Coding] = ALL_FREE, per_byte: float = PER_BYTE, components: int = 1
) -> Question:
    """Return a question on 2 ranks, with one large matrix per component."""
    sizes = Sizes((Gradient(SIDE, SIDE, True),))
    costs = [replace(component(k, 4 * SIDE * SIDE), tensors=sizes) for k in range(components)]
    machine = known(
        costs, [1 / components] * components, [1, 1], network(2, reduce_per_byte=per_byte)
    )
    coded = machine.profile.with_coding({cost.name: coding for cost in costs})
    return Question(replace(machine, profile=coded), 8, "sgd")


def dp(question: Question) -> Plan:
    return replicated(list(question.known.profile.names), 2, 1, None)


def seconds(question: Question, agreement: Agreement, plan: Plan | None = None) -> float:
    known = replace(question.known, agreement=agreement)
    return play(replace(question, known=known), plan or dp(question), "").seconds


@pytest.mark.parametrize(
    ("agreement", "travelled"),
    [
        (Agreement(), 40_000),
        (Agreement(compress="bf16"), 10_000 + 10_000),
        (Agreement(compress="topk:0.01"), 100 * 8),
        (Agreement(compress="powersgd:2"), 800 + 800),
        (Agreement(parse_sync_request("local:4")), 40_008 / 4),
        (Agreement(parse_sync_request("local:4@2")), 40_008 / 4),
        (Agreement(parse_sync_request("local:4"), averaged=(2, 1)), (3 * 40_000 + 12) / 4),
        (Agreement(parse_sync_request("diloco:5")), 40_008 / 5),
    ],
)
def test_seconds_follow_from_bytes(agreement: Agreement, travelled: float) -> None:
    """One bucket, which is complete when the backward is over, so that nothing is hidden."""
    requested = question()
    assert seconds(requested, agreement) == pytest.approx(COMPUTED + PER_BYTE * travelled)
    # On two ranks an all-reduce sends each byte once.
    assert rank_bytes(agreement, dp(requested), requested.known.by_name) == (travelled, travelled)


def test_compressing_and_decompressing_take_their_time() -> None:
    free, coded = question(), question(NONE_FREE)
    for method, code in NONE_FREE.items():
        agreement = Agreement(compress=method)
        more = seconds(coded, agreement) - seconds(free, agreement)
        assert more == pytest.approx(code.encode + code.decode)
    assert seconds(coded, Agreement()) == seconds(free, Agreement())


def test_the_slowest_rank_compresses_last() -> None:
    requested = question(NONE_FREE)
    slower = replace(requested.known, profile=requested.known.profile.scaled([1, 3]))
    agreement = Agreement(compress="bf16")
    free = question()
    plain = replace(free.known, profile=free.known.profile.scaled([1, 3]))
    more = seconds(replace(requested, known=slower), agreement) - seconds(
        replace(free, known=plain), agreement
    )
    assert more == pytest.approx(3 * 0.75)


def test_a_method_that_was_not_measured_has_no_prediction() -> None:
    with pytest.raises(KeyError):
        seconds(question(), Agreement(compress="topk:0.5"))


def test_ranks_without_replicas_send_nothing() -> None:
    requested = question(components=2)
    plan = pipeline(list(requested.known.profile.names), [1, 1], 2, 2, 1, 4, "1f1b")
    agreement = Agreement(compress="bf16")
    assert rank_bytes(agreement, plan, requested.known.by_name) == (0, 0)
    assert seconds(requested, agreement, plan) == seconds(requested, Agreement(), plan)


def test_later_buckets_hide_nothing_of_the_second_operations(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first of two buckets sends its slices during the backward, not its sums."""
    monkeypatch.setattr("hvdtrain.planner.agreement.FIRST_BUCKET_BYTES", 1)
    monkeypatch.setattr("hvdtrain.planner.agreement.BUCKET_BYTES", 1)
    requested = question(components=2)
    exact = PER_BYTE * 40_000  # of one component; its backward takes 4 s
    assert seconds(requested, Agreement()) == pytest.approx(COMPUTED + exact)
    halved = seconds(requested, Agreement(compress="bf16"))
    assert halved == pytest.approx(COMPUTED + exact / 4 + 2 * exact / 4)


@pytest.mark.parametrize(
    ("options", "agreement"),
    [
        ({}, Agreement()),
        ({"compress": "bf16"}, Agreement(compress="bf16")),
        ({"sync": "local:4"}, Agreement(parse_sync_request("local:4"))),
        (
            {"sync": "local:4,average-optimizer"},
            Agreement(parse_sync_request("local:4,average-optimizer"), averaged=(2, 1)),
        ),
        (
            {"sync": "local:4,average-optimizer", "optimizer": "sgd", "momentum": 0.0},
            Agreement(parse_sync_request("local:4,average-optimizer")),
        ),
        ({"sync": "diloco:4"}, Agreement(parse_sync_request("diloco:4"))),
    ],
)
def test_options_become_an_agreement(options: dict[str, object], agreement: Agreement) -> None:
    config = TrainConfig(model="cnn", data="d", **options)  # type: ignore[arg-type]
    assert agreement_of(config) == agreement


def test_a_plan_is_chosen_for_what_travels() -> None:
    """A network on which exact replicas lose to a pipeline, and compressed ones do not."""
    requested = question(components=2)

    def best(agreement: Agreement) -> int:
        known: Known = replace(requested.known, agreement=agreement)
        return len(solve(replace(requested, known=known)).chosen.plan.stages)

    assert best(Agreement()) == 2
    assert best(Agreement(compress="powersgd:2")) == 1


def test_typical_costs_are_those_of_reading_and_writing() -> None:
    costs = [component(0, 1000)]
    coding = typical_coding(["bf16"], costs, 1e3)["part0"]["bf16"]
    assert coding == (7.0, 4.5)
