"""ResNeXt-50 of 32 groups by 4 channels (Xie et al., 2017): a residual network of grouped bottlenecks."""

from unity_ir.models.vision import resnet
from unity_ir.pcg.graph import Graph


def build(
    batch: int = 64, image: int = 224, classes: int = 1000, depth: int = 50, channels: int = 64, groups: int = 32
) -> Graph:
    """
    Build ResNeXt-50, or of another `depth` (see `vision.BLOCKS`), up to its cross-entropy loss; weights have
    torchvision's names. Inputs are `x` [batch, 3, image, image] and the class ids `labels` [batch].

    `image` is the height and width of images, `channels` the width of the stem, `groups` the number of groups of the
    blocks' 3 x 3 convolutions. The default batch is Unity's (section 6.1).
    """
    return resnet("resnext50", batch, image, classes, depth, channels, inner=2, groups=groups)
