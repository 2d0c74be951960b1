"""ResNet-101 (He et al., 2015): a residual network of bottlenecks."""

from unity_ir.models.vision import resnet
from unity_ir.pcg.graph import Graph


def build(batch: int = 64, image: int = 224, classes: int = 1000, depth: int = 101, channels: int = 64) -> Graph:
    """
    Build ResNet-101, or of another `depth` (see `vision.BLOCKS`), up to its cross-entropy loss; weights have
    torchvision's names. Inputs are `x` [batch, 3, image, image] and the class ids `labels` [batch].

    `image` is the height and width of images, `channels` the width of the stem. The default batch is FlexFlow's
    (section 8).
    """
    return resnet("resnet101", batch, image, classes, depth, channels)
