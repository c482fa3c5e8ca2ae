"""Train a small network in PyTorch on many ranks: only the lines with `distributed` are new.

With one process, and with two ranks:

    python examples/torch_script.py data/cifar10
    mpirun -np 2 --bind-to none python examples/torch_script.py data/cifar10
"""

import sys

import numpy as np
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import hvdtrain.torch as distributed
from hvdtrain import data

BATCH_SIZE, EPOCHS = 64, 3


def tensors(folder: str, split: str) -> TensorDataset:
    """Return the images and labels of a split."""
    index = data.read_index(folder)
    with data.open_split(index, split) as samples:
        batch = samples.gather(np.arange(len(samples)))
    mean, std = (torch.tensor(values).view(-1, 1, 1) for values in index.normalisation("meanstd"))
    images = torch.from_numpy(batch.images).permute(0, 3, 1, 2).float() / 255
    return TensorDataset((images - mean) / std, torch.from_numpy(batch.labels))


def network(classes: int) -> nn.Module:
    """Return two blocks of convolution and batch norm, and a linear layer."""
    return nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3, padding=1),
        nn.BatchNorm2d(64),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(4),
        nn.Flatten(),
        nn.Linear(64 * 16, classes),
    )


rank = distributed.start()
torch.manual_seed(0)
train, test = (tensors(sys.argv[1], split) for split in ("train", "test"))
train_loader = DataLoader(train, batch_sampler=distributed.sampler(train, BATCH_SIZE))
test_loader = DataLoader(test, batch_sampler=distributed.sampler(test, BATCH_SIZE, shuffle=False))
model = network(classes=10)
optimizer = torch.optim.Adam(model.parameters(), 1e-3)
model, optimizer = distributed.prepare(model, optimizer)

for epoch in range(EPOCHS):
    model.train()
    for images, labels in train_loader:
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
    accuracy = distributed.evaluate(model, test_loader)["accuracy"]
    if rank.is_first:
        print(f"epoch {epoch + 1}: test accuracy {accuracy:.4f}")
