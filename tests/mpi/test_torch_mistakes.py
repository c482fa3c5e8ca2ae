"""Mistakes in a user's own loop are one line on all ranks; data of a loop."""

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from hvdtrain import torch as distributed
from hvdtrain.data import order
from hvdtrain.data.index import read_index
from hvdtrain.data.shards import open_split
from hvdtrain.errors import CheckFailed, HvdtrainError, UsageError
from hvdtrain.torch import gradients
from hvdtrain.torch.reading import Batch
from hvdtrain.torch.start import current
from hvdtrain.world import World
from tests.mpi.loops import on_batch
from tests.mpi.packed import (
    BATCH,
    COUNT,
    backward,
    made,
)
from tests.mpi.packed import (
    folder as folder,
)
from tests.mpi.packed import (
    place as place,
)


def twice(model: Any, optimizer: Any) -> None:
    backward(model)
    backward(model)


def not_cleared(model: Any, optimizer: Any) -> None:
    for _ in range(2):
        backward(model)
        optimizer.step()


def as_in_a_tutorial_on_gans(model: Any, optimizer: Any) -> None:
    """The loss of the generator passes through the critic, whose gradients are not cleared."""
    generator = nn.Conv2d(3, 3, 1)
    optimizers = (torch.optim.SGD(generator.parameters(), 0.1), optimizer)
    distributed.prepare(generator, optimizers[0])
    fake = generator(torch.ones(4, 3, 8, 8))
    backward(model, fake.detach())
    optimizer.step()
    generator.zero_grad()
    backward(model, fake)


def only_accumulated(model: Any, optimizer: Any) -> None:
    with distributed.accumulate():
        backward(model)
    optimizer.step()


def clipped_too_early(model: Any, optimizer: Any) -> None:
    with distributed.accumulate():
        backward(model)
        distributed.clip_norm_(model.parameters(), 1.0)


def never_steps(model: Any, optimizer: Any) -> None:
    for _ in range(6):
        optimizer.zero_grad()
        backward(model)


def never_steps_at_all(model: Any, optimizer: Any) -> None:
    for _ in range(2):
        optimizer.zero_grad()
        backward(model)
    distributed.save("nowhere")


def new_layer(model: Any, optimizer: Any) -> None:
    model[3] = nn.Linear(8, 5)
    backward(model)
    optimizer.step()


def unfrozen(model: Any, optimizer: Any) -> None:
    model[1].weight.requires_grad_(False)
    backward(model)
    optimizer.step()


def other_dtype(model: Any, optimizer: Any) -> None:
    backward(model.double(), torch.ones(4, 3, 8, 8).double())


def other_optimizer(model: Any, optimizer: Any) -> None:
    backward(model)
    torch.optim.SGD(model.parameters(), 0.1).step()


def other_model(model: Any, optimizer: Any) -> None:
    model, optimizer = made()
    backward(model)
    optimizer.step()


def layers_alone(model: Any, optimizer: Any) -> None:
    backward(nn.Sequential(*model))


def caught_in_backward(model: Any, optimizer: Any) -> None:
    handle = model[3].weight.register_hook(fails)
    with suppress(MemoryError):
        backward(model)
    handle.remove()
    backward(model)
    optimizer.step()


def fails(_: Tensor) -> None:
    raise MemoryError


def foreign_group(model: Any, optimizer: Any) -> None:
    optimizer.add_param_group({"params": nn.Linear(2, 2).parameters()})
    backward(model)
    optimizer.step()


def wrapped(model: Any, optimizer: Any) -> None:
    distributed.prepare(nn.DataParallel(model), optimizer)


def not_its_optimizer(model: Any, optimizer: Any) -> None:
    distributed.prepare(made()[0], optimizer)


def brain_floats(model: Any, optimizer: Any) -> None:
    distributed.prepare((model := nn.Linear(2, 2).bfloat16()), torch.optim.SGD(model.parameters()))


def sparse(model: Any, optimizer: Any) -> None:
    model = nn.Embedding(4, 2, sparse=True)
    distributed.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
    model(torch.tensor([1, 2])).sum().backward()


def nothing_to_evaluate(model: Any, optimizer: Any) -> None:
    distributed.evaluate(model, [])


ALWAYS: dict[Callable[..., None], str] = {
    twice: "backward ran twice without a step",
    not_cleared: "the gradients of the last step are still there",
    as_in_a_tutorial_on_gans: r"call zero_grad\(\) of the AdamW of model 0 \(Sequential\) before",
    only_accumulated: "the optimizer steps with gradients that were only accumulated",
    clipped_too_early: "clip_norm_ needs averaged gradients",
    never_steps: "backward ran 5 times and the optimizer given to prepare did not step",
    never_steps_at_all: "backward ran 2 times and the optimizer given to prepare did not step",
    new_layer: r"the model has changed since prepare: 3.weight is new \(and 1 more\)",
    unfrozen: "the model has changed since prepare: 1.weight is no longer trained",
    other_dtype: r"3.bias was torch.float32 on cpu at prepare, and is torch.float64",
    layers_alone: "the number of samples of this backward is not known",
    caught_in_backward: "a backward ended with an exception that was caught",
    foreign_group: "an optimizer AdamW has got parameters that are not the model's",
    wrapped: "the model is wrapped in DataParallel",
    not_its_optimizer: "the optimizer AdamW has parameters that are not the model's",
    brain_floats: "weight is torch.bfloat16, whose gradients cannot be summed",
    sparse: "the gradient of weight is sparse",
    nothing_to_evaluate: "evaluate got no samples on any rank",
}
ON_SEVERAL: dict[Callable[..., None], str] = {
    other_optimizer: "an optimizer SGD steps a prepared model, but was not given to prepare",
    other_model: "an optimizer AdamW steps a model that was not prepared",
}


@pytest.mark.proves(
    "`hvdtrain.torch` stops a job that would be silently wrong or hang, with one line."
)
def test_a_mistake_is_one_line(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each mistake is made on ranks that made none before; the message says what to do."""
    if world.size > 2:
        return  # nothing differs from two ranks
    monkeypatch.setattr(gradients, "MOST_IDLE", 5)
    for mistake, message in (ALWAYS | (ON_SEVERAL if world.size > 1 else {})).items():
        distributed.stop()
        distributed.start(device="cpu")
        model, optimizer = distributed.prepare(*made())
        with pytest.raises(UsageError, match=message) as caught:
            mistake(model, optimizer)
        assert "\n" not in str(caught.value), mistake.__name__


def unlike_model(world: World) -> None:
    model = nn.Linear(3, 2 + (world.rank == 1))
    distributed.prepare(model, torch.optim.SGD(model.parameters(), 0.1))


def unlike_optimizer(world: World) -> None:
    model = nn.Linear(3, 2)
    distributed.prepare(model, torch.optim.SGD(model.parameters(), 0.1 + (world.rank == 1)))


def unlike_weights(world: World) -> None:
    model, _ = distributed.prepare(*made())
    if world.rank == 1:
        model[3].weight.data[0, 0] += 1e-7
    backward(model)


def one_step_fewer(world: World) -> None:
    model, _ = distributed.prepare(*made())
    if world.rank == 1:
        distributed.total(1)
    else:
        backward(model)


def one_batch_fewer(world: World) -> None:
    model, _ = distributed.prepare(*made())
    on_batch(4, 4 * world.size, 0, "data", 16 * (1 + (world.rank == 1)))
    backward(model)


def at_the_end(world: World) -> None:
    model, _ = distributed.prepare(*made())
    if world.rank == 1:
        current().agreement.exchange("at the end of the program")
    else:
        backward(model)


UNLIKE: dict[Callable[[World], None], tuple[type[HvdtrainError], str]] = {
    unlike_model: (UsageError, "rank 1 has another model than rank 0: weight is 3 x 3 float32"),
    unlike_optimizer: (UsageError, "rank 1 has another optimizer than rank 0: lr of group 0"),
    unlike_weights: (CheckFailed, "rank 1 and rank 0 hold different values of 3.weight: load"),
    one_step_fewer: (CheckFailed, "rank 1 is adding up numbers while rank 0 is counting the sa"),
    one_batch_fewer: (
        CheckFailed,
        "rank 1 is in backward 1 of model 0 after 32 samples while rank 0 is in backward 1 of "
        "model 0 after 16 samples: make the same",
    ),
    at_the_end: (CheckFailed, "rank 1 is at the end of the program while rank 0 is counting"),
}


@pytest.mark.several_ranks
def test_ranks_that_differ_end_on_all_ranks(world: World) -> None:
    for mistake, (kind, message) in UNLIKE.items():
        distributed.stop()
        distributed.start(device="cpu")
        with pytest.raises(kind, match=message):
            mistake(world)


def test_weights_and_optimizer_are_those_of_the_first_rank(world: World) -> None:
    model, optimizer = made(seed=world.rank)
    with distributed.alone():
        backward(model)
        optimizer.step()
    distributed.prepare(model, optimizer)
    kept = [value.detach().clone() for value in model.parameters()]
    kept += [entry["exp_avg"].clone() for entry in optimizer.state.values()]
    for values in world.gather(kept):
        assert all(torch.equal(value, one) for value, one in zip(values, kept, strict=True))


def test_a_model_may_be_prepared_again_after_a_change(world: World) -> None:
    model, optimizer = distributed.prepare(*made())
    backward(model)
    optimizer.step()
    model[1].requires_grad_(False)
    model, optimizer = distributed.prepare(model, optimizer)
    optimizer.zero_grad()
    backward(model)
    optimizer.step()
    assert model[1].weight.grad is None


@pytest.mark.proves(
    "`hvdtrain.torch` gives each rank its share of each batch, evaluates each sample "
    "once, and stops, saves and resumes on another number of ranks."
)
def test_ranks_share_each_batch_in_the_order_of_training(world: World, folder: Path) -> None:
    """Two epochs, one left early: each sample enters a gradient once per epoch."""
    index = read_index(str(folder))
    rows, held = order.holdout(COUNT, 0.2, index.hash, 3)
    model, optimizer = distributed.prepare(*made())
    options: dict[str, Any] = {"seed": 3, "holdout": 0.2, "normalise": "unit"}
    read: list[tuple[Tensor, Tensor, Batch | None]] = []
    for most in (2, 99, 99):  # an iteration that is left after two batches, its rest, and an epoch
        loader = distributed.loader(folder, BATCH, **options)
        assert loader.epoch == (most == 99 and len(read) > 2)
        assert len(loader) == -(-len(rows) // BATCH)
        for number, (images, labels) in enumerate(loader):
            if number == most:
                break
            optimizer.zero_grad()
            backward(model, images)
            optimizer.step()
            read.append((images, labels, current().use_batch()))
    everywhere = world.gather(read)
    with open_split(index, "train") as samples:
        place = 0
        for epoch in range(2):
            wanted = order.training_order(index, rows, 3, epoch)
            for start, stop in order.step_slices(len(rows), BATCH):
                whole = samples.gather(wanted[start:stop])
                parts = [batches[place] for batches in everywhere]
                real = [part for part in parts if part[2].samples]
                assert sum(part[2].samples for part in parts) == stop - start
                pixels = torch.cat([part[0] for part in real]).permute(0, 2, 3, 1)
                assert np.array_equal(np.round(pixels.numpy() * 255), whole.images)
                assert np.array_equal(torch.cat([part[1] for part in real]).numpy(), whole.labels)
                place += 1
    assert place == len(read)
    evaluated = distributed.loader(folder, BATCH, split="val", **options)
    assert distributed.total(sum(len(labels) for _, labels in evaluated)) == len(held)


def test_a_last_batch_that_is_smaller_can_be_left_out(world: World, folder: Path) -> None:
    """Three whole batches are an epoch, and the next iteration is in the next one."""
    model, optimizer = distributed.prepare(*made())
    loader = distributed.loader(folder, BATCH, drop_last=True)
    for epoch in range(2):
        assert (loader.epoch, len(loader)) == (epoch, COUNT // BATCH)
        totals = []
        for images, _ in loader:
            optimizer.zero_grad()
            backward(model, images)
            optimizer.step()
            totals.append(distributed.total(len(images)))
        assert totals == [BATCH] * (COUNT // BATCH)
    with pytest.raises(UsageError, match="61 samples give no batch of 62: use a smaller batch"):
        distributed.loader(folder, COUNT + 1, drop_last=True)


def test_an_evaluation_counts_each_sample_once(world: World, folder: Path) -> None:
    model, _ = distributed.prepare(*made())
    with open_split(read_index(str(folder)), "test") as samples:
        whole = samples.gather(np.arange(len(samples)))
    images = torch.from_numpy(whole.images).permute(0, 3, 1, 2).float() / 255
    labels = torch.from_numpy(whole.labels)
    with torch.no_grad():
        outputs = model.eval()(images)
    test = distributed.loader(folder, 7, split="test", normalise="unit")
    results = distributed.evaluate(model, test)
    assert results["samples"] == len(labels)
    assert results["accuracy"] == float((outputs.argmax(1) == labels).sum()) / len(labels)
    wanted = float(functional.cross_entropy(outputs.double(), labels))
    assert results["loss"] == pytest.approx(wanted, rel=1e-5)
    small = TensorDataset(images[:2], labels[:2])  # fewer samples than ranks
    one = DataLoader(small, batch_sampler=distributed.sampler(small, 1, shuffle=False))
    assert distributed.evaluate(model, one)["samples"] == 2
    assert distributed.total(1, 0.5, torch.tensor(2.0)) == (
        world.size,
        0.5 * world.size,
        2.0 * world.size,
    )
