"""Convolutional networks as they are written in PyTorch: a plain one, ResNets, Inception-v3 at small sizes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


def plain() -> tuple[nn.Module, Any, Any]:
    """With a bias, a batch norm without weights, and every kind of pool."""
    module = nn.Sequential(
        *(nn.Conv2d(3, 6, 3, padding="same"), nn.BatchNorm2d(6), nn.ReLU(inplace=True), nn.MaxPool2d(2)),
        *(nn.Conv2d(6, 8, (1, 3), stride=(1, 2), padding=(0, 1), groups=2), nn.BatchNorm2d(8, affine=False)),
        *(nn.LeakyReLU(0.1), nn.AvgPool2d(3, 1, 1, count_include_pad=False), nn.AdaptiveAvgPool2d((2, 1))),
        *(nn.Flatten(), nn.Linear(16, 4)),
    )
    return module, (torch.randn(2, 3, 8, 8), torch.randint(0, 4, (2,))), nn.CrossEntropyLoss()


class Basic(nn.Module):
    """Two 3x3 convolutions beside a way straight through (He et al., 2015)."""

    expansion = 1

    def __init__(self, channels: int, width: int, stride: int):
        super().__init__()
        self.conv1 = nn.Conv2d(channels, width, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = (
            nn.Sequential(nn.Conv2d(channels, width, 1, stride, bias=False), nn.BatchNorm2d(width))
            if stride != 1 or channels != width
            else None
        )

    def forward(self, x: Tensor) -> Tensor:
        out = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        out += x if self.downsample is None else self.downsample(x)
        return self.relu(out)


class Bottleneck(nn.Module):
    """1x1, grouped 3x3 and 1x1, as in ResNet-50 and ResNeXt-50."""

    expansion = 4

    def __init__(self, channels: int, width: int, stride: int):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(channels, width, 1, bias=False), nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, 1, groups=2, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3, self.bn3 = nn.Conv2d(width, 4 * width, 1, bias=False), nn.BatchNorm2d(4 * width)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = nn.Sequential(
            nn.Conv2d(channels, 4 * width, 1, stride, bias=False), nn.BatchNorm2d(4 * width)
        )

    def forward(self, x: Tensor) -> Tensor:
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn3(self.conv3(self.relu(self.bn2(self.conv2(out)))))
        out += self.downsample(x)
        return self.relu(out)


class ResNet(nn.Module):
    """The stem, stages of blocks, and the head of torchvision's ResNet."""

    def __init__(self, block: type[Basic | Bottleneck], width: int = 4, stages: int = 3, classes: int = 5):
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, 7, 2, 3, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, 2, 1)
        layers: list[nn.Module] = []
        channels = width
        for stage in range(stages):
            layers.append(block(channels, width << stage, 1 if stage == 0 else 2))
            channels = (width << stage) * block.expansion
        self.layers = nn.Sequential(*layers)
        self.avgpool = nn.AdaptiveAvgPool2d((1, 1))
        self.fc = nn.Linear(channels, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        return self.fc(torch.flatten(self.avgpool(self.layers(x)), 1))


def resnet(block: type[Basic | Bottleneck]) -> tuple[nn.Module, Any, Any]:
    return ResNet(block), (torch.randn(2, 3, 32, 32), torch.randint(0, 5, (2,))), nn.CrossEntropyLoss()


class Conv(nn.Module):
    """Convolution, batch norm, relu."""

    def __init__(self, channels: int, out: int, kernel: Any, **more: Any):
        super().__init__()
        self.conv = nn.Conv2d(channels, out, kernel, bias=False, **more)
        self.bn = nn.BatchNorm2d(out, eps=0.001)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.bn(self.conv(x)), inplace=True)


class InceptionA(nn.Module):
    def __init__(self, channels: int, w: int):
        super().__init__()
        self.branch1x1 = Conv(channels, w, 1)
        self.branch5x5 = nn.Sequential(Conv(channels, w, 1), Conv(w, w, 5, padding=2))
        self.branch3x3 = nn.Sequential(Conv(channels, w, 1), Conv(w, w, 3, padding=1), Conv(w, w, 3, padding=1))
        self.branch_pool = Conv(channels, w, 1)
        self.out = 4 * w

    def forward(self, x: Tensor) -> Tensor:
        pool = self.branch_pool(F.avg_pool2d(x, kernel_size=3, stride=1, padding=1))
        return torch.cat([self.branch1x1(x), self.branch5x5(x), self.branch3x3(x), pool], 1)


class InceptionB(nn.Module):
    def __init__(self, channels: int, w: int):
        super().__init__()
        self.branch3x3 = Conv(channels, w, 3, stride=2)
        self.branch3x3dbl = nn.Sequential(Conv(channels, w, 1), Conv(w, w, 3, padding=1), Conv(w, w, 3, stride=2))
        self.out = 2 * w + channels

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.branch3x3(x), self.branch3x3dbl(x), F.max_pool2d(x, kernel_size=3, stride=2)], 1)


class InceptionC(nn.Module):
    def __init__(self, channels: int, w: int):
        super().__init__()
        row, column = {"kernel": (1, 7), "padding": (0, 3)}, {"kernel": (7, 1), "padding": (3, 0)}
        self.branch1x1 = Conv(channels, w, 1)
        self.branch7x7 = nn.Sequential(Conv(channels, w, 1), Conv(w, w, **row), Conv(w, w, **column))
        self.branch3x3dbl = nn.Sequential(Conv(channels, w, 1), Conv(w, w, **column), Conv(w, w, **row))
        self.branch_pool = Conv(channels, w, 1)
        self.out = 4 * w

    def forward(self, x: Tensor) -> Tensor:
        pool = self.branch_pool(F.avg_pool2d(x, kernel_size=3, stride=1, padding=1))
        return torch.cat([self.branch1x1(x), self.branch7x7(x), self.branch3x3dbl(x), pool], 1)


class InceptionE(nn.Module):
    def __init__(self, channels: int, w: int):
        super().__init__()
        self.branch1x1 = Conv(channels, w, 1)
        self.branch3x3_1 = Conv(channels, w, 1)
        self.branch3x3_2a = Conv(w, w, (1, 3), padding=(0, 1))
        self.branch3x3_2b = Conv(w, w, (3, 1), padding=(1, 0))
        self.branch_pool = Conv(channels, w, 1)
        self.out = 4 * w

    def forward(self, x: Tensor) -> Tensor:
        inner = self.branch3x3_1(x)
        pool = self.branch_pool(F.avg_pool2d(x, kernel_size=3, stride=1, padding=1))
        return torch.cat([self.branch1x1(x), self.branch3x3_2a(inner), self.branch3x3_2b(inner), pool], 1)


class Inception(nn.Module):
    """Inception-v3 (Szegedy et al., 2015) with one block of every kind, without the auxiliary head."""

    def __init__(self, w: int = 2, classes: int = 5):
        super().__init__()
        self.stem = nn.Sequential(
            *(Conv(3, w, 3, stride=2), Conv(w, w, 3), Conv(w, 2 * w, 3, padding=1), nn.MaxPool2d(3, 2)),
            *(Conv(2 * w, 3 * w, 1), Conv(3 * w, 4 * w, 3), nn.MaxPool2d(3, 2)),
        )
        blocks: list[Any] = [InceptionA(4 * w, w)]
        for kind in (InceptionB, InceptionC, InceptionB, InceptionE):
            blocks.append(kind(blocks[-1].out, w))
        self.blocks = nn.Sequential(*blocks)
        self.avgpool = nn.AdaptiveAvgPool2d((1, 1))
        self.dropout = nn.Dropout(0)
        self.fc = nn.Linear(blocks[-1].out, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(torch.flatten(self.dropout(self.avgpool(self.blocks(self.stem(x)))), 1))


def inception() -> tuple[nn.Module, Any, Any]:
    # 107 is the smallest size at which no block is left a single element per channel and image.
    return Inception(), (torch.randn(2, 3, 107, 107), torch.randint(0, 5, (2,))), nn.CrossEntropyLoss()


NETWORKS = {
    "plain": plain,
    "resnet_basic": lambda: resnet(Basic),
    "resnet_bottleneck": lambda: resnet(Bottleneck),
    "inception_v3": inception,
}
