from hvdtrain.device import ranks_on_one_gpu

FIRST, SECOND = ("node1", "GPU-1"), ("node1", "GPU-2")


def test_ranks_that_share_a_gpu_are_named() -> None:
    assert ranks_on_one_gpu([FIRST, SECOND, FIRST, ("node2", "GPU-1")]) == [0, 2]


def test_ranks_on_cpus_and_on_gpus_of_their_own_share_none() -> None:
    assert not ranks_on_one_gpu([None, None])
    assert not ranks_on_one_gpu([FIRST, SECOND, ("node2", "GPU-1"), None])
