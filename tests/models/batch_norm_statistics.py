"""Batch-norm statistics for tests of networks."""

from __future__ import annotations

from torch import nn


def with_statistics(net: nn.Module) -> nn.Module:
    """Draw statistics and weights for BatchNorm: untrained BatchNorm is the identity, which would hide mistakes."""
    for module in net.modules():
        if isinstance(module, nn.BatchNorm2d):
            assert module.running_mean is not None and module.running_var is not None
            module.running_mean.normal_(0, 0.3)
            module.running_var.uniform_(0.5, 2)
            nn.init.uniform_(module.weight, 0.5, 1.5)
            nn.init.normal_(module.bias, 0, 0.2)
    return net.eval()
