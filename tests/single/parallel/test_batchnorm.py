import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from typing import Any, TypeVar

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor, nn

from hvdtrain.errors import UsageError
from hvdtrain.parallel import batchnorm
from hvdtrain.parallel.batchnorm import AllGather, gather_moments, synchronise

T = TypeVar("T")


class Replicas:
    """Replicas as threads of this process that gather through a barrier."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.barrier = threading.Barrier(count, timeout=30)
        self.tensors = [torch.empty(0)] * count
        self.gathered = [0] * count

    def run(self, work: Callable[[int, AllGather], T]) -> list[T]:
        def one(replica: int) -> T:
            try:
                return work(replica, lambda tensor: self._gather(replica, tensor))
            except BaseException:
                self.barrier.abort()
                raise

        with ThreadPoolExecutor(self.count) as pool:
            return [task.result() for task in [pool.submit(one, r) for r in range(self.count)]]

    def _gather(self, replica: int, tensor: Tensor) -> Tensor:
        assert tensor.dim() == 1
        self.gathered[replica] += 1
        self.tensors[replica] = tensor
        self.barrier.wait()
        stacked = torch.stack(self.tensors)
        self.barrier.wait()
        return stacked


def alone(tensor: Tensor) -> Tensor:
    return tensor[None]


def mirrored(tensor: Tensor) -> Tensor:
    """Gather from two replicas that have the same rows."""
    return torch.stack([tensor, tensor])


def refused(tensor: Tensor) -> Tensor:
    raise AssertionError("nothing should have been gathered")


class Network(nn.Sequential):
    """Batch norms of both kinds, with scales and shifts that affect the output."""

    def __init__(self) -> None:
        super().__init__(
            nn.Conv2d(3, 8, 3, bias=False),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.Conv2d(8, 6, 3, stride=2, bias=False),
            nn.BatchNorm2d(6),
            nn.ReLU(),  # without it the next batch norm would cancel scale and shift of this one
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.BatchNorm1d(6),
            nn.Linear(6, 4),
        )
        for parameter in self.parameters():
            nn.init.normal_(parameter, 0.3)


def network(dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(7)
    return Network().to(dtype=dtype)


def images(count: int, dtype: torch.dtype) -> Tensor:
    drawn = torch.randn(count, 3, 9, 9, generator=torch.Generator().manual_seed(count))
    # Rows differ much, so that the statistics of a share differ much from those of the whole.
    drawn += torch.arange(count).view(-1, 1, 1, 1)
    return drawn.to(dtype).contiguous(memory_format=torch.channels_last)


def step(model: nn.Module, x: Tensor, weights: Tensor) -> dict[str, Tensor]:
    """Run a forward and a backward; return output, gradients and statistics by name."""
    x = x.detach().requires_grad_()
    output = model(x)
    (output * weights).sum().backward()
    assert x.grad is not None
    gradients = {name: value.grad.detach() for name, value in model.named_parameters()}  # type: ignore[union-attr]
    return {"output": output.detach(), "input": x.grad} | gradients | dict(model.named_buffers())


def in_replicas(
    rows: Sequence[int], dtype: torch.dtype, synchronised: bool = True
) -> tuple[dict[str, Tensor], list[dict[str, Tensor]], Replicas]:
    """Run a micro-batch on a plain model and in shares on replicas.

    Return the result of the plain model, those of the replicas, and the replicas.
    """
    x = images(sum(rows), dtype)
    weights = torch.linspace(-1, 1, sum(rows) * 4, dtype=dtype).view(-1, 4).sin()
    shares = list(zip(x.split(rows), weights.split(rows), strict=True))
    replicas = Replicas(len(rows))

    def work(replica: int, all_gather: AllGather) -> dict[str, Tensor]:
        model = models[replica]
        if synchronised:
            assert synchronise(model, all_gather) == 3
        return step(model, *shares[replica])

    models = [network(dtype) for _ in rows]
    return step(network(dtype), x, weights), replicas.run(work), replicas


def joined(results: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Join the results of replicas: rows in order, summed weight gradients, statistics."""
    together = dict(results[0])
    for name in together:
        if name in ("output", "input"):
            together[name] = torch.cat([result[name] for result in results])
        elif not is_statistic(name):
            together[name] = sum((result[name] for result in results[1:]), results[0][name])
    return together


def is_statistic(name: str) -> bool:
    return name.endswith(("running_mean", "running_var", "num_batches_tracked"))


def difference(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Return the largest error of all tensors, measured as `reference.largest_errors`."""
    assert actual.keys() == expected.keys()
    floor = 1e-6 * max(float(value.abs().max()) for value in expected.values())
    return max(
        float((actual[name] - value).abs().max()) / max(float(value.abs().max()), floor)
        for name, value in expected.items()
    )


ROWS = [(7,), (4, 3), (1, 6), (0, 5), (3, 0, 4), (2, 2, 1), (0, 0, 6)]


@pytest.mark.proves(
    "`--batch-norm sync` normalises over the whole micro-batch, `local` over a replica's part."
)
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-12), (torch.float32, 1e-4)])
def test_shares_of_a_micro_batch_give_what_the_whole_gives(
    rows: tuple[int, ...], dtype: torch.dtype, bound: float
) -> None:
    expected, results, replicas = in_replicas(rows, dtype)
    assert difference(joined(results), expected) <= bound
    for name in filter(is_statistic, expected):
        assert all(torch.equal(result[name], results[0][name]) for result in results)
    assert set(replicas.gathered) == {6}  # three layers, forward and backward


def test_without_synchronisation_shares_give_something_else() -> None:
    expected, results, _ = in_replicas((4, 3), torch.float64, synchronised=False)
    assert difference(joined(results), expected) > 0.1


SHAPES = {nn.BatchNorm1d: (4, 3), nn.BatchNorm2d: (3, 3, 2, 4), nn.BatchNorm3d: (2, 3, 2, 1, 3)}


@pytest.mark.parametrize("kind", SHAPES)
@pytest.mark.parametrize("all_gather", [alone, mirrored])
def test_gradients_are_those_of_finite_differences(
    kind: type[nn.BatchNorm2d], all_gather: AllGather
) -> None:
    """The mirrored rows change too: each replica has half of the gradient of both outputs."""
    torch.manual_seed(0)
    layer = kind(3, eps=0.1, track_running_stats=False).double()
    synchronise(layer, all_gather)
    inputs = [torch.randn(size, dtype=torch.float64) for size in (SHAPES[kind], (3,), (3,))]

    def normalised(x: Tensor, weight: Tensor, bias: Tensor) -> Any:
        return torch.func.functional_call(layer, {"weight": weight, "bias": bias}, (x,))

    assert torch.autograd.gradcheck(normalised, [value.requires_grad_() for value in inputs])


@pytest.mark.parametrize(
    "options",
    [
        {"affine": False},
        {"bias": False},
        {"momentum": None},
        {"momentum": 0.5, "eps": 0.2},
        {"track_running_stats": False},
    ],
    ids=str,
)
@pytest.mark.parametrize("shape", [(6, 3), (6, 3, 5)])
def test_every_option_means_what_it_means_to_torch(
    options: dict[str, Any], shape: tuple[int, ...]
) -> None:
    torch.manual_seed(1)
    plain = nn.BatchNorm1d(3, **options).double()
    layer = deepcopy(plain)
    synchronise(layer, alone)
    for count in (6, 3, 0, 4):
        x = torch.randn(shape, dtype=torch.float64)[:count] + count
        if count:
            assert difference(step(layer, x, x.sin()), step(plain, x, x.sin())) <= 1e-12
        else:
            assert layer(x).shape == plain(x).shape == x.shape
        assert layer.state_dict().keys() == plain.state_dict().keys()
        for actual, expected in zip(layer.buffers(), plain.buffers(), strict=True):
            assert torch.allclose(actual, expected, rtol=1e-12, atol=0)


@pytest.mark.parametrize("options", [{}, {"track_running_stats": False}], ids=str)
def test_evaluation_is_untouched(options: dict[str, Any]) -> None:
    plain = nn.BatchNorm2d(3, **options).train(False)
    layer = deepcopy(plain)
    synchronise(layer, refused)
    x = images(4, torch.float32)
    assert torch.equal(layer(x), plain(x))


@pytest.mark.parametrize("form", [torch.channels_last, torch.contiguous_format])
def test_the_memory_format_stays(form: torch.memory_format) -> None:
    x = torch.randn(2, 3, 4, 5).contiguous(memory_format=form).requires_grad_()
    layer = nn.BatchNorm2d(3)
    synchronise(layer, alone)
    output = layer(x)
    output.backward(torch.ones(1).expand_as(output))
    assert output.is_contiguous(memory_format=form)
    assert x.grad is not None
    assert x.grad.is_contiguous(memory_format=form)


@pytest.mark.parametrize("shape", [(6, 3), (4, 3, 5, 5)])
def test_operations_of_any_device_give_what_cpu_kernels_give(
    shape: tuple[int, ...],
) -> None:
    generator = torch.Generator().manual_seed(0)
    input, gradient = torch.randn(2, *shape, dtype=torch.float64, generator=generator)
    mean, variance = batchnorm._local_moments(input, torch.float64)
    for value, expected in zip(
        batchnorm.moments_by_operations(input, torch.float64), (mean, variance), strict=True
    ):
        torch.testing.assert_close(value, expected)
    values = gradient, input, mean, variance, 1e-5
    torch.testing.assert_close(
        batchnorm.gradient_sums_by_operations(*values), batchnorm._gradient_sums(*values)
    )


@pytest.mark.parametrize("affine", [True, False])
def test_bf16_is_normalised_in_fp32(affine: bool) -> None:
    x = images(5, torch.bfloat16)
    plain = nn.BatchNorm2d(3, affine=affine)
    layer = deepcopy(plain)
    synchronise(layer, mirrored)
    actual, expected = step(layer, x, x.sin()), step(plain, x, x.sin())
    for name, value in expected.items():
        assert actual[name].dtype == value.dtype
    exact = step(deepcopy(plain).double(), x.double(), x.sin().double())
    for name in ("output", "input"):
        error = {
            key: float((result[name].double() - exact[name]).abs().max())
            for key, result in {"actual": actual, "expected": expected}.items()
        }
        assert error["actual"] <= 2 * error["expected"]


def test_the_moments_do_not_suffer_from_a_large_mean() -> None:
    x = images(6, torch.float64) + 1e6
    parts = x.split([1, 0, 5])
    results = Replicas(3).run(lambda replica, gather: gather_moments(parts[replica], gather))
    variance, mean = torch.var_mean(x, (0, 2, 3), correction=0)
    for moments in results:
        assert torch.allclose(moments.mean, mean, rtol=1e-15, atol=0)
        assert torch.allclose(moments.variance, variance, rtol=1e-9, atol=0)
        assert torch.equal(moments.variance, results[0].variance)


@settings(max_examples=20, deadline=None)
@given(st.lists(st.integers(0, 4), min_size=1, max_size=4).filter(any))
def test_any_shares_have_the_moments_of_the_whole(rows: list[int]) -> None:
    x = images(sum(rows), torch.float64)
    parts = x.split(rows)
    work = Replicas(len(rows)).run(lambda replica, gather: gather_moments(parts[replica], gather))
    variance, mean = torch.var_mean(x, (0, 2, 3), correction=0)
    for moments in work:
        assert moments.count == sum(rows) * 81
        assert torch.allclose(moments.mean, mean, rtol=1e-12, atol=0)
        assert torch.allclose(moments.variance, variance, rtol=1e-12, atol=0)


def test_one_value_per_replica_is_enough_and_one_in_all_is_not() -> None:
    def work(rows: Sequence[int]) -> Callable[[int, AllGather], str]:
        def one(replica: int, gather: AllGather) -> str:
            layer = nn.BatchNorm1d(2)
            synchronise(layer, gather)
            try:
                layer(torch.randn(rows[replica], 2))
            except ValueError as error:
                return str(error)
            return "fine"

        return one

    assert Replicas(2).run(work([1, 1])) == ["fine", "fine"]
    refusals = Replicas(2).run(work([1, 0]))
    assert all("Expected more than 1 value per channel" in refusal for refusal in refusals)


def test_nothing_is_gathered_for_a_gradient_that_nobody_needs() -> None:
    calls = []

    def counted(tensor: Tensor) -> Tensor:
        calls.append(len(tensor))
        return tensor[None]

    layer = nn.BatchNorm2d(3)
    synchronise(layer, counted)
    layer(images(2, torch.float32)).sum().backward()
    assert calls == [7]
    assert layer.bias.grad is not None


def test_parameters_and_buffers_stay_the_same_objects() -> None:
    shared = nn.BatchNorm2d(3)
    module = nn.Sequential(shared, nn.InstanceNorm2d(3), nn.Sequential(shared, nn.BatchNorm1d(2)))
    before = {name: id(value) for name, value in module.state_dict(keep_vars=True).items()}
    assert synchronise(module, refused) == 2
    assert synchronise(module, alone) == 2
    assert {name: id(value) for name, value in module.state_dict(keep_vars=True).items()} == before
    assert isinstance(module[0], nn.BatchNorm2d)


class Special(nn.BatchNorm2d):
    pass


def test_a_batch_norm_of_another_class_is_refused_and_nothing_changed() -> None:
    module = nn.Sequential(nn.BatchNorm2d(3), nn.Sequential(Special(3)))
    with pytest.raises(UsageError, match=r"layer '1\.0' is a Special, which cannot"):
        synchronise(module, alone)
    assert type(module[0]) is nn.BatchNorm2d
