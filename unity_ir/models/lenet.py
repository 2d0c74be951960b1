"""LeNet-5 (LeCun et al., 1998): two convolutions, each before a mean pool, and three dense layers."""

from unity_ir.models.vision import Vision
from unity_ir.pcg.graph import Graph


def build(batch: int = 64, image: int = 32, classes: int = 10) -> Graph:
    """
    Build LeNet-5 up to its cross-entropy loss. Inputs are `x` [batch, 1, image, image] and the class ids `labels`
    [batch]. Every convolution reads all channels before it, as is usual since; the original left some out.
    """
    b = Vision("lenet")
    x, labels = b.input("x", batch, 1, image, image), b.input("labels", batch, dtype="i64")
    for name, size in (("conv1", 6), ("conv2", 16)):
        x = b.avg_pool(b.op("tanh", b.conv(x, name, size, 5, bias=True)), 2, 2)
    x = b.flatten(x)
    for name, size in (("fc1", 120), ("fc2", 84)):
        x = b.op("tanh", b.linear(x, name, size))
    return b.graph(b.op("cross_entropy", b.linear(x, "fc3", classes), labels))
