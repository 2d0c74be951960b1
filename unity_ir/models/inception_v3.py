"""Inception-v3 (Szegedy et al., 2016) with its auxiliary classifier, without dropout; torchvision's names and sizes."""

from __future__ import annotations

from unity_ir.models.vision import Sizes, Vision
from unity_ir.pcg.graph import Graph
from unity_ir.pcg.node import Value


class _Inception(Vision):
    def __init__(self, channels: int):
        super().__init__("inception_v3")
        self.channels = channels

    def layer(
        self, x: Value, name: str, size: int, kernel: Sizes, stride: Sizes = 1, padding: Sizes | None = None
    ) -> Value:
        """Convolution, batch norm, relu; `size` is as published. With no padding given, the image keeps its size."""
        if padding is None:
            padding = (kernel[0] // 2, kernel[1] // 2) if isinstance(kernel, tuple) else kernel // 2
        y = self.conv(x, f"{name}.conv", size * self.channels // 32, kernel, stride, padding)
        return self.op("relu", self.batch_norm(y, f"{name}.bn", eps=1e-3))

    def layers(self, x: Value, name: str, *layers: tuple[str, int, Sizes]) -> Value:
        """Several, (name, size, kernel) each."""
        for part, size, kernel in layers:
            x = self.layer(x, f"{name}.{part}", size, kernel)
        return x

    def join(self, *branches: Value) -> Value:
        return self.op("concat", *branches, dim=1)

    def stem(self, x: Value) -> Value:
        x = self.layer(x, "Conv2d_1a_3x3", 32, 3, 2, 0)
        x = self.layer(x, "Conv2d_2a_3x3", 32, 3, 1, 0)
        x = self.max_pool(self.layer(x, "Conv2d_2b_3x3", 64, 3), 3, 2)
        x = self.layer(self.layer(x, "Conv2d_3b_1x1", 80, 1), "Conv2d_4a_3x3", 192, 3, 1, 0)
        return self.max_pool(x, 3, 2)

    def a(self, x: Value, name: str, pool: int) -> Value:
        return self.join(
            self.layer(x, f"{name}.branch1x1", 64, 1),
            self.layers(x, name, ("branch5x5_1", 48, 1), ("branch5x5_2", 64, 5)),
            self.layers(x, name, ("branch3x3dbl_1", 64, 1), ("branch3x3dbl_2", 96, 3), ("branch3x3dbl_3", 96, 3)),
            self.layer(self.avg_pool(x, 3, 1, 1), f"{name}.branch_pool", pool, 1),
        )

    def b(self, x: Value, name: str) -> Value:
        double = self.layers(x, name, ("branch3x3dbl_1", 64, 1), ("branch3x3dbl_2", 96, 3))
        return self.join(
            self.layer(x, f"{name}.branch3x3", 384, 3, 2, 0),
            self.layer(double, f"{name}.branch3x3dbl_3", 96, 3, 2, 0),
            self.max_pool(x, 3, 2),
        )

    def c(self, x: Value, name: str, size: int) -> Value:
        row, column = (1, 7), (7, 1)
        seven = ("branch7x7_1", size, 1), ("branch7x7_2", size, row), ("branch7x7_3", 192, column)
        double = ("branch7x7dbl_1", size, 1), ("branch7x7dbl_2", size, column), ("branch7x7dbl_3", size, row)
        return self.join(
            self.layer(x, f"{name}.branch1x1", 192, 1),
            self.layers(x, name, *seven),
            self.layers(x, name, *double, ("branch7x7dbl_4", size, column), ("branch7x7dbl_5", 192, row)),
            self.layer(self.avg_pool(x, 3, 1, 1), f"{name}.branch_pool", 192, 1),
        )

    def d(self, x: Value, name: str) -> Value:
        three = self.layer(x, f"{name}.branch3x3_1", 192, 1)
        seven = ("branch7x7x3_1", 192, 1), ("branch7x7x3_2", 192, (1, 7)), ("branch7x7x3_3", 192, (7, 1))
        return self.join(
            self.layer(three, f"{name}.branch3x3_2", 320, 3, 2, 0),
            self.layer(self.layers(x, name, *seven), f"{name}.branch7x7x3_4", 192, 3, 2, 0),
            self.max_pool(x, 3, 2),
        )

    def e(self, x: Value, name: str) -> Value:
        three = self.layer(x, f"{name}.branch3x3_1", 384, 1)
        double = self.layers(x, name, ("branch3x3dbl_1", 448, 1), ("branch3x3dbl_2", 384, 3))
        halves = ("a", (1, 3)), ("b", (3, 1))
        return self.join(
            self.layer(x, f"{name}.branch1x1", 320, 1),
            self.join(*(self.layer(three, f"{name}.branch3x3_2{part}", 384, kernel) for part, kernel in halves)),
            self.join(*(self.layer(double, f"{name}.branch3x3dbl_3{part}", 384, kernel) for part, kernel in halves)),
            self.layer(self.avg_pool(x, 3, 1, 1), f"{name}.branch_pool", 192, 1),
        )

    def auxiliary(self, x: Value, classes: int) -> Value:
        # An image smaller than the published one leaves less than 5 x 5 to pool and to convolve.
        pool = min(5, x.shape[2])
        x = self.layer(self.avg_pool(x, pool, 3), "AuxLogits.conv0", 128, 1)
        x = self.layer(x, "AuxLogits.conv1", 768, min(5, x.shape[2]), 1, 0)
        return self.linear(self.global_pool(x), "AuxLogits.fc", classes)


def build(batch: int = 64, image: int = 299, classes: int = 1000, channels: int = 32) -> Graph:
    """
    Build Inception-v3 up to its loss; the default batch is Unity's (section 6.1). Inputs are `x` [batch, 3, image,
    image] and the class ids `labels` [batch].

    `image` is the height and width of images, `channels` the width of the first layer, with which all other widths
    scale. The loss is the classifier's plus 0.4 times the auxiliary classifier's, as published.
    """
    b = _Inception(channels)
    x, labels = b.input("x", batch, 3, image, image), b.input("labels", batch, dtype="i64")
    x = b.stem(x)
    for part, pool in (("b", 32), ("c", 64), ("d", 64)):
        x = b.a(x, f"Mixed_5{part}", pool)
    x = b.b(x, "Mixed_6a")
    for part, size in (("b", 128), ("c", 160), ("d", 160), ("e", 192)):
        x = b.c(x, f"Mixed_6{part}", size)
    auxiliary = b.op("cross_entropy", b.auxiliary(x, classes), labels)
    x = b.e(b.e(b.d(x, "Mixed_7a"), "Mixed_7b"), "Mixed_7c")
    loss = b.op("cross_entropy", b.linear(b.global_pool(x), "fc", classes), labels)
    return b.graph(b.op("add", loss, b.op("scale", auxiliary, by=0.4)))
