"""WResNet as Tofu has it (section 7.1): a residual network on ImageNet with every convolution `width` times as wide."""

from unity_ir.models.vision import resnet
from unity_ir.pcg.graph import Graph


def build(
    batch: int = 128, image: int = 224, classes: int = 1000, depth: int = 50, width: int = 4, channels: int = 64
) -> Graph:
    """
    Build Tofu's wide residual network up to its cross-entropy loss; the default batch is Tofu's (section 7.2). Inputs
    are `x` [batch, 3, image, image] and the class ids `labels` [batch].

    Every convolution is `width` times as wide as ResNet's, whose stem has `channels` channels; `image` is the height
    and width of images. Tofu's networks have depths 50, 101 and 152 and widths from 4 to 10.
    """
    return resnet("wresnet", batch, image, classes, depth, width * channels)
