"""The learning rate as a function of the position in training."""

import math

from hvdtrain.config import TrainConfig


def learning_rate(config: TrainConfig, epoch_length: int, position: int) -> float:
    """Return the learning rate of the step that starts at `position` (samples consumed so far).

    Linear warm-up from zero (Goyal et al., arXiv 1706.02677). Then it is constant, follows a
    cosine to zero (Loshchilov and Hutter, arXiv 1608.03983), or is divided by ten at 50 % and at
    75 % of training.
    """
    peak = config.learning_rate()
    warmup = config.warmup_epochs * epoch_length
    if position < warmup:
        return peak * min(1.0, (position + config.batch_size) / warmup)
    total = config.total_samples(epoch_length)
    done = min(1.0, (position - warmup) / max(1.0, total - warmup))
    if config.lr_schedule == "cosine":
        return peak * 0.5 * (1 + math.cos(math.pi * done))
    if config.lr_schedule == "step":
        progress = position / total
        return peak * (0.01 if progress >= 0.75 else 0.1 if progress >= 0.5 else 1.0)
    return peak
