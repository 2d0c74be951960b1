"""WResNet as Tofu has it (section 7.1): a residual network on ImageNet with every convolution `width` times as wide."""

from unity_ir.models.vision import resnet
from unity_ir.pcg.graph import Graph


def build(
    batch: int = 128, image: int = 224, classes: int = 1000, depth: int = 50, width: int = 4, channels: int = 64
) -> Graph:
    """Tofu's are of depth 50, 101 and 152 and of width 4 to 10; batch as in its section 7.2."""
    return resnet("wresnet", batch, image, classes, depth, width * channels)
