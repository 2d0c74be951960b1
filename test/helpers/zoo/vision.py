"""Convolutional networks by hand."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from zoo.common import Keys, Weights, linear

SMALL: dict[str, dict[str, int]] = {
    "alexnet": {"batch": 2, "image": 64, "classes": 5, "channels": 2, "hidden": 7},
    "inception_v3": {"batch": 3, "image": 75, "classes": 5, "channels": 2},
    "lenet": {"batch": 3, "classes": 5},
    "resnet101": {"batch": 3, "image": 48, "classes": 5, "depth": 14, "channels": 2},
    "resnext50": {"batch": 3, "image": 48, "classes": 5, "depth": 14, "channels": 2, "groups": 2},
    "wresnet": {"batch": 3, "image": 48, "classes": 5, "depth": 26, "width": 2, "channels": 1},
}


def conv(w: Weights, name: str, x: Tensor, stride: int = 1, padding: int | str = 0, groups: int = 1) -> Tensor:
    return F.conv2d(x, w[f"{name}.weight"], w.get(f"{name}.bias"), stride, padding, groups=groups)


def norm(w: Weights, name: str, x: Tensor, eps: float = 1e-5) -> Tensor:
    return F.batch_norm(x, None, None, w[f"{name}.weight"], w[f"{name}.bias"], training=True, eps=eps)


def resnet(w: Weights, keys: Keys, x: Tensor, labels: Tensor) -> Tensor:
    """Of any depth: a block is there when it has weights."""
    x = F.max_pool2d(F.relu(norm(w, "bn1", conv(w, "conv1", x, 2, 3))), 3, 2, 1)
    for stage in range(1, 5):
        i = 0
        while f"layer{stage}.{i}.conv1.weight" in w:
            name = f"layer{stage}.{i}"
            stride = 2 if stage > 1 and i == 0 else 1
            h = F.relu(norm(w, f"{name}.bn1", conv(w, f"{name}.conv1", x)))
            h = F.relu(norm(w, f"{name}.bn2", conv(w, f"{name}.conv2", h, stride, 1, keys.get("groups", 1))))
            h = norm(w, f"{name}.bn3", conv(w, f"{name}.conv3", h))
            if i == 0:
                x = norm(w, f"{name}.downsample.1", conv(w, f"{name}.downsample.0", x, stride))
            x = F.relu(x + h)
            i += 1
    return F.cross_entropy(linear(w, "fc", F.adaptive_avg_pool2d(x, 1).flatten(1)), labels)


def alexnet(w: Weights, keys: Keys, x: Tensor, labels: Tensor) -> Tensor:
    x = F.max_pool2d(F.relu(conv(w, "features.0", x, 4, 2)), 3, 2)
    x = F.max_pool2d(F.relu(conv(w, "features.3", x, 1, 2)), 3, 2)
    for name in ("features.6", "features.8", "features.10"):
        x = F.relu(conv(w, name, x, 1, 1))
    x = F.max_pool2d(x, 3, 2).flatten(1)
    x = F.relu(linear(w, "classifier.4", F.relu(linear(w, "classifier.1", x))))
    return F.cross_entropy(linear(w, "classifier.6", x), labels)


def lenet(w: Weights, keys: Keys, x: Tensor, labels: Tensor) -> Tensor:
    x = F.avg_pool2d(torch.tanh(conv(w, "conv1", x)), 2)
    x = F.avg_pool2d(torch.tanh(conv(w, "conv2", x)), 2).flatten(1)
    x = torch.tanh(linear(w, "fc2", torch.tanh(linear(w, "fc1", x))))
    return F.cross_entropy(linear(w, "fc3", x), labels)


def inception_v3(w: Weights, keys: Keys, x: Tensor, labels: Tensor) -> Tensor:
    def layer(x: Tensor, name: str, stride: int = 1, padding: int | str = 0) -> Tensor:
        return F.relu(norm(w, f"{name}.bn", conv(w, f"{name}.conv", x, stride, padding), 1e-3))

    def chain(x: Tensor, name: str, count: int, last: int = 1) -> Tensor:
        """`name_1` to `name_count`, the last of stride `last`; what has a stride has no padding."""
        for i in range(1, count + 1):
            stride = last if i == count else 1
            x = layer(x, f"{name}_{i}", stride, "same" if stride == 1 else 0)
        return x

    def pooled(x: Tensor, name: str) -> Tensor:
        return layer(F.avg_pool2d(x, 3, 1, 1), f"{name}.branch_pool")

    x = layer(layer(x, "Conv2d_1a_3x3", 2), "Conv2d_2a_3x3")
    x = F.max_pool2d(layer(x, "Conv2d_2b_3x3", 1, 1), 3, 2)
    x = F.max_pool2d(layer(layer(x, "Conv2d_3b_1x1"), "Conv2d_4a_3x3"), 3, 2)
    for m in ("Mixed_5b", "Mixed_5c", "Mixed_5d"):
        five, three = chain(x, f"{m}.branch5x5", 2), chain(x, f"{m}.branch3x3dbl", 3)
        x = torch.cat([layer(x, f"{m}.branch1x1"), five, three, pooled(x, m)], 1)
    three = chain(x, "Mixed_6a.branch3x3dbl", 3, 2)
    x = torch.cat([layer(x, "Mixed_6a.branch3x3", 2), three, F.max_pool2d(x, 3, 2)], 1)
    for m in ("Mixed_6b", "Mixed_6c", "Mixed_6d", "Mixed_6e"):
        seven, double = chain(x, f"{m}.branch7x7", 3), chain(x, f"{m}.branch7x7dbl", 5)
        x = torch.cat([layer(x, f"{m}.branch1x1"), seven, double, pooled(x, m)], 1)
    side = F.avg_pool2d(x, min(5, x.shape[-1]), 3)
    side = layer(layer(side, "AuxLogits.conv0"), "AuxLogits.conv1").mean((2, 3))
    three, seven = chain(x, "Mixed_7a.branch3x3", 2, 2), chain(x, "Mixed_7a.branch7x7x3", 4, 2)
    x = torch.cat([three, seven, F.max_pool2d(x, 3, 2)], 1)
    for m in ("Mixed_7b", "Mixed_7c"):
        one, three, double = layer(x, f"{m}.branch1x1"), chain(x, f"{m}.branch3x3", 1), chain(x, f"{m}.branch3x3dbl", 2)
        threes = [layer(three, f"{m}.branch3x3_2{half}", 1, "same") for half in "ab"]
        doubles = [layer(double, f"{m}.branch3x3dbl_3{half}", 1, "same") for half in "ab"]
        x = torch.cat([one, *threes, *doubles, pooled(x, m)], 1)
    loss = F.cross_entropy(linear(w, "fc", x.mean((2, 3))), labels)
    return loss + 0.4 * F.cross_entropy(linear(w, "AuxLogits.fc", side), labels)


BY_HAND: dict[str, Callable[..., Tensor]] = {
    "alexnet": alexnet,
    "inception_v3": inception_v3,
    "lenet": lenet,
    "resnet101": resnet,
    "resnext50": resnet,
    "wresnet": resnet,
}
