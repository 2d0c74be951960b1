"""Base class of builders of convolutional networks: layers on values [batch, channels, height, width]."""

from __future__ import annotations

from unity_ir.errors import UnityError
from unity_ir.models.builder import Builder
from unity_ir.pcg.graph import Graph
from unity_ir.pcg.node import Value

Sizes = int | tuple[int, int]
"""A size for both dims of an image, or one for each."""


def _pair(size: Sizes) -> tuple[int, int]:
    return size if isinstance(size, tuple) else (size, size)


class Vision(Builder):
    """Base class of builders of convolutional networks; weights have torchvision's names and layouts."""

    def conv(
        self,
        x: Value,
        name: str,
        size: int,
        kernel: Sizes,
        stride: Sizes = 1,
        padding: Sizes = 0,
        groups: int = 1,
        bias: bool = False,
    ) -> Value:
        """
        Apply a convolution with `size` output channels to images [batch, channels, height, width].

        `kernel`, `stride` and `padding` are for both dims, or (height, width). Weights are `name.weight` [size,
        channels / groups, height, width] and, with `bias`, `name.bias` [size]. Raises `UnityError` if channels do not
        divide into `groups`.
        """
        if x.shape[1] % groups or size % groups:
            raise UnityError(f"--model: {name}: {x.shape[1]} to {size} channels are not {groups} equal groups")
        w = self.weight(f"{name}.weight", size, x.shape[1] // groups, *_pair(kernel))
        windows = {"stride": _pair(stride), "padding": _pair(padding), "dilation": (1, 1)}
        y = self.op("conv2d", x, w, **windows, groups=groups)
        if not bias:
            return y
        return self.op("add", y, self.op("reshape", self.weight(f"{name}.bias", size), shape=(size, 1, 1)))

    def batch_norm(self, x: Value, name: str, eps: float = 1e-5) -> Value:
        """
        Normalise images `x` [batch, channels, height, width] per channel by the statistics of the batch, with `eps`
        added to the variance; weights are `name.weight` and `name.bias` [channels].
        """
        center = self.op("batch_mean", x)
        shift, square = self.results("batch_stats", x, center)
        weight, bias = (self.weight(f"{name}.{part}", x.shape[1]) for part in ("weight", "bias"))
        return self.op("batch_norm", x, shift, square, center, weight, bias, eps=eps)

    def max_pool(self, x: Value, kernel: Sizes, stride: Sizes, padding: Sizes = 0) -> Value:
        """
        Apply max pooling to images [batch, channels, height, width]; `kernel`, `stride` and `padding` are for both
        dims, or (height, width).
        """
        windows = {"kernel": _pair(kernel), "stride": _pair(stride), "padding": _pair(padding)}
        return self.op("max_pool2d", x, **windows, dilation=(1, 1))

    def avg_pool(self, x: Value, kernel: Sizes, stride: Sizes, padding: Sizes = 0) -> Value:
        """
        Apply average pooling to images [batch, channels, height, width]; padding counts as zeros. `kernel`, `stride`
        and `padding` are for both dims, or (height, width).
        """
        return self.op("avg_pool2d", x, kernel=_pair(kernel), stride=_pair(stride), padding=_pair(padding))

    def global_pool(self, x: Value) -> Value:
        """Average images [batch, channels, height, width] over height and width; return [batch, channels]."""
        return self.op("reduce_mean", x, dim=2, count=2)

    def flatten(self, x: Value) -> Value:
        """Return images [batch, channels, height, width] as [batch, channels * height * width]."""
        batch, *image = x.shape
        size = 1
        for extent in image:
            size *= extent
        return self.op("reshape", x, shape=(batch, size))


BLOCKS = {14: (1, 1, 1, 1), 26: (2, 2, 2, 2), 50: (3, 4, 6, 3), 101: (3, 4, 23, 3), 152: (3, 8, 36, 3)}
"""Bottleneck blocks of each stage, by the depth of the network."""


def resnet(
    name: str, batch: int, image: int, classes: int, depth: int, channels: int, inner: int = 1, groups: int = 1
) -> Graph:
    """
    Build a residual network of bottleneck blocks (He et al., 2015), called `name`, up to its cross-entropy loss, in
    torchvision's variant, where the 3 x 3 convolution has the stride. Inputs are `x` [batch, 3, image, image] and the
    class ids `labels` [batch].

    `depth` is the number of layers, such as 50. `channels` is the width of the first convolution, and of the blocks of
    torchvision's `layer1`; it doubles for each of `layer2` to `layer4`. The 3 x 3 convolution of a block has `inner`
    times as many channels, in `groups` groups, and the block returns 4 times as many. `image` is the height and width
    of images.

    Raises `UnityError` unless `depth` is 14, 26, 50, 101 or 152.
    """
    if depth not in BLOCKS:
        raise UnityError(f"--model: {name}: depth is {depth}; it must be one of {', '.join(map(str, BLOCKS))}")
    b = Vision(name)
    x, labels = b.input("x", batch, 3, image, image), b.input("labels", batch, dtype="i64")
    x = b.op("relu", b.batch_norm(b.conv(x, "conv1", channels, 7, 2, 3), "bn1"))
    x = b.max_pool(x, 3, 2, 1)
    for stage, blocks in enumerate(BLOCKS[depth]):
        for i in range(blocks):
            stride = 2 if stage and not i else 1
            x = _bottleneck(b, x, f"layer{stage + 1}.{i}", channels << stage, inner, groups, stride)
    return b.graph(b.op("cross_entropy", b.linear(b.global_pool(x), "fc", classes), labels))


def _bottleneck(b: Vision, x: Value, name: str, planes: int, inner: int, groups: int, stride: int) -> Value:
    h = b.op("relu", b.batch_norm(b.conv(x, f"{name}.conv1", planes * inner, 1), f"{name}.bn1"))
    h = b.conv(h, f"{name}.conv2", planes * inner, 3, stride, 1, groups)
    h = b.op("relu", b.batch_norm(h, f"{name}.bn2"))
    h = b.batch_norm(b.conv(h, f"{name}.conv3", 4 * planes, 1), f"{name}.bn3")
    if x.shape != h.shape:
        x = b.batch_norm(b.conv(x, f"{name}.downsample.0", 4 * planes, 1, stride), f"{name}.downsample.1")
    return b.op("relu", b.op("add", h, x))
