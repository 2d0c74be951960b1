"""ResNet-101 (He et al., 2015): a residual network of bottlenecks."""

from unity_ir.models.vision import resnet
from unity_ir.pcg.graph import Graph


def build(batch: int = 64, image: int = 224, classes: int = 1000, depth: int = 101, channels: int = 64) -> Graph:
    """Batch as in FlexFlow (section 8). Weights have torchvision's names."""
    return resnet("resnet101", batch, image, classes, depth, channels)
