"""A training step as far as the machine can tell: a few matrix products that keep every core busy."""

from __future__ import annotations

import torch

# Few and large products: many small ones make its threads wait for each other wherever a core is taken from them.
_WIDTH, _BATCH, _LAYERS = 1024, 512, 2


class Training:
    """A small network without meaning: forward, backward, update. Its weights are not what is saved."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(1)
        self._batch = torch.randn(_BATCH, _WIDTH, generator=generator)
        self._weights = [torch.randn(_WIDTH, _WIDTH, generator=generator) / _WIDTH**0.5 for _ in range(_LAYERS)]

    def step(self) -> None:
        activations = [self._batch]
        for weight in self._weights:
            activations.append(torch.relu(activations[-1] @ weight))
        gradient = activations[-1] - self._batch
        for weight, activation in zip(reversed(self._weights), reversed(activations[:-1]), strict=True):
            change = activation.T @ gradient
            gradient = gradient @ weight.T
            weight.sub_(change, alpha=1e-9)
