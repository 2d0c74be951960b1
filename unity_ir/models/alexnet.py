"""AlexNet (Krizhevsky, 2014): five convolutions and three dense layers, without dropout."""

from unity_ir.models.vision import Vision
from unity_ir.pcg.graph import Graph


def build(batch: int = 256, image: int = 224, classes: int = 1000, channels: int = 64, hidden: int = 4096) -> Graph:
    """
    Build AlexNet up to its cross-entropy loss; weights have torchvision's names. Inputs are `x` [batch, 3, image,
    image] and the class ids `labels` [batch].

    `image` is the height and width of images, `channels` the width of the first convolution, with which those of the
    others scale, `hidden` the width of the dense layers. The default batch is FlexFlow's (section 8).
    """
    b = Vision("alexnet")
    x, labels = b.input("x", batch, 3, image, image), b.input("labels", batch, dtype="i64")
    x = b.max_pool(b.op("relu", b.conv(x, "features.0", channels, 11, 4, 2, bias=True)), 3, 2)
    x = b.max_pool(b.op("relu", b.conv(x, "features.3", 3 * channels, 5, 1, 2, bias=True)), 3, 2)
    for name, times in (("features.6", 6), ("features.8", 4), ("features.10", 4)):
        x = b.op("relu", b.conv(x, name, times * channels, 3, 1, 1, bias=True))
    x = b.flatten(b.max_pool(x, 3, 2))
    for name in ("classifier.1", "classifier.4"):
        x = b.op("relu", b.linear(x, name, hidden))
    return b.graph(b.op("cross_entropy", b.linear(x, "classifier.6", classes), labels))
