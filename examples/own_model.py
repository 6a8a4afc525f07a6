"""An own network, loss and metric: `python examples/own_model.py`."""

import numpy as np
import torch
from torch import nn

import fedmll

rng = np.random.default_rng(0)
images = rng.integers(0, 256, size=(300, 16, 16, 3), dtype=np.uint8)
labels = np.stack([images[..., color].mean((1, 2)) > 127 for color in range(3)], 1).astype(int)
net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten())


def focal(logits, targets):
    loss = nn.functional.binary_cross_entropy_with_logits(logits, targets, reduction="none")
    return (1 - torch.exp(-loss)) ** 2 * loss


print(fedmll.run(data=(images, labels), model=net, loss=focal, method="fedavg", rounds=3, clients=4))
