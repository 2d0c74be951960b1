"""CANDLE-Uno, as FlexFlow trains it: a tower of dense layers per cell and drug feature, concatenated, before an MLP."""

from unity_ir.models.builder import Builder
from unity_ir.pcg.graph import Graph
from unity_ir.pcg.node import Value

_FEATURES = {
    "cell.rnaseq": 942,
    "dose1": 1,
    "dose2": 1,
    "drug1.descriptors": 5270,
    "drug1.fingerprints": 2048,
    "drug2.descriptors": 5270,
    "drug2.fingerprints": 2048,
}


def build(batch: int = 256, hidden: int = 4192, tower: int = 8, layers: int = 4, shrink: int = 1) -> Graph:
    """
    Build CANDLE-Uno up to its mean squared error, in the sizes of FlexFlow's example, without dropout; the default
    batch is Unity's (section 6.1). Inputs are the features [batch, size], by name, and the labels `growth` [batch, 1].

    Each feature except the doses has `tower` dense layers of its own weights; `layers` more follow the concatenation;
    all are `hidden` wide. `shrink` divides the features' sizes, for small instances.
    """
    b = Builder("candle_uno")
    encoded: list[Value] = []
    for feature, size in _FEATURES.items():
        x = b.input(feature, batch, max(1, size // shrink))
        for i in range(0 if feature.startswith("dose") else tower):
            x = b.op("relu", b.linear(x, f"{feature}.dense{i}", hidden, bias=False))
        encoded.append(x)
    labels = b.input("growth", batch, 1)
    x = b.op("concat", *encoded, dim=1)
    for i in range(layers):
        x = b.op("relu", b.linear(x, f"dense{i}", hidden, bias=False))
    return b.graph(b.op("mse", b.linear(x, f"dense{layers}", 1, bias=False), labels))
