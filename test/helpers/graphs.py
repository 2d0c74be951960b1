"""Random serial graphs, and small machines."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import numpy as np

from unity_ir.machine import Level, Machine, load
from unity_ir.pcg.differentiate import needs_gradient
from unity_ir.pcg.graph import Graph, topological
from unity_ir.pcg.node import Node, Value, apply, leaf
from unity_ir.pcg.types import tensor_type
from unity_ir.tdl.functions import Array


def boxes(*sizes: int, overhead: float = 0.0, bandwidth: float = 1e9) -> Machine:
    """Levels of these sizes, outermost first and slowest; on which nothing costs anything to start unless asked."""
    box = load("box:2")
    levels = tuple(Level(f"level{i}", size, bandwidth * 4**i, overhead) for i, size in enumerate(sizes))
    device = replace(box.device, launch=overhead)
    return replace(box, name="boxes", device=device, levels=levels, overhead=overhead, protocols=())


def with_memory(machine: Machine, bytes: float) -> Machine:
    """
    The machine, of whose devices a plan may take so many bytes; as many are in reserve, and count in nothing. Kernels
    and links are as before.
    """
    return replace(machine, device=replace(machine.device, memory=2 * int(bytes), reserve=int(bytes)))


class RandomGraph:
    """
    Grows a forward graph whose first output is a scalar loss.

    Values are used any number of times, results of a split may go unused, a weight may be used twice or be an output.
    """

    def __init__(self, random: Random, size: int, dims: tuple[int, ...] = (2, 4, 6), dtype: str = "f64"):
        self.random = random
        self.dims = dims
        self.dtype = dtype
        self.names = 0
        self.inputs: list[Node] = []
        self.weights: list[Value] = []
        self.values = [self.input((random.choice(dims), random.choice(dims)))]
        for _ in range(size):
            self.values += self.grow()

    def graph(self) -> Graph:
        """The graph: its loss, and now and then another value as a second output."""
        last = self.values[-1]
        if last.node not in needs_gradient(topological([last])):
            last = apply("mul", [last, self.weight(last.shape)]).result
        target = self.input(last.shape)
        outputs = [apply("mse", [last, target]).result]
        if self.random.random() < 0.3:
            outputs.append(self.random.choice([*self.values, *self.weights]))
        return Graph("random", tuple(self.inputs), tuple(outputs))

    def input(self, shape: tuple[int, ...]) -> Value:
        node = leaf("input", tensor_type(shape, self.dtype), name=f"x{len(self.inputs)}")
        self.inputs.append(node)
        return node.result

    def weight(self, shape: tuple[int, ...]) -> Value:
        old = [w for w in self.weights if w.shape == shape]
        if old and self.random.random() < 0.4:
            return self.random.choice(old)
        self.names += 1
        self.weights.append(leaf("weight", tensor_type(shape, self.dtype), name=f"w{self.names}").result)
        return self.weights[-1]

    def grow(self) -> list[Value]:
        """One more operator on values there are; usually the newest."""
        pick = self.random.choice
        x = self.values[-1] if self.random.random() < 0.6 else pick(self.values)
        rank = len(x.shape)
        alike = [v for v in self.values if v.shape == x.shape]
        even = [d for d, size in enumerate(x.shape) if size % 2 == 0]
        kinds = ["relu", "gelu", "add", "mul", "bias", "gate"]
        kinds += (
            ["matmul", "matmul", "twins"] * (rank > 0)
            + ["transpose", "reduce_sum"] * (rank > 1)
            + ["split"] * bool(even)
        )
        kinds += ["concat", "reshape"] * (rank > 0 and x.type.elements <= 64)
        match kind := pick(kinds):
            case "relu" | "gelu":
                return [apply(kind, [x]).result]
            case "add" | "mul":
                return [apply(kind, [x, pick(alike)]).result]
            case "bias":
                return [apply("add", [x, self.weight(x.shape[self.random.randint(0, rank) :])]).result]
            case "gate":
                # Both sides broadcast: sizes of 1, and leading dims that are missing.
                shape = tuple(pick([size, 1]) for size in x.shape[self.random.randint(0, rank) :])
                return [apply("mul", pick([[x, self.weight(shape)], [self.weight(shape), x]])).result]
            case "matmul":
                act = pick(["identity", "relu", "gelu"])
                return [apply("matmul", [x, self.weight((x.shape[-1], pick(self.dims)))], {"act": act}).result]
            case "twins":
                return [apply("matmul", [x, self.weight((x.shape[-1], pick(self.dims)))]).result for _ in range(2)]
            case "transpose":
                return [apply("transpose", [x], {"perm": tuple(self.random.sample(range(rank), rank))}).result]
            case "reduce_sum":
                return [apply("reduce_sum", [x], {"dim": self.random.randrange(rank)}).result]
            case "split":
                dim = pick(even)
                half = x.shape[dim] // 2
                parts = list(apply("split", [x], {"dim": dim, "sizes": (half, half)}).results)
                self.random.shuffle(parts)
                return parts
            case "concat":
                return [apply("concat", [x, pick(alike)], {"dim": self.random.randrange(rank)}).result]
            case _:
                return [apply("reshape", [x], {"shape": (x.type.elements,)}).result]


def random_graph(random: Random, size: int, dims: tuple[int, ...] = (2, 4, 6), dtype: str = "f64") -> Graph:
    """A random forward graph of about `size` operators."""
    return RandomGraph(random, size, dims, dtype).graph()


def random_cnn(random: Random, size: int) -> Graph:
    """A forward graph of `size` convolutions, poolings and elementwise operators over images of 8 x 8, and its loss."""
    shape = (2, 2, 8, 8)
    inputs = [leaf("input", tensor_type(shape, "f64"), name="x")]
    values = [inputs[0].result]
    for i in range(size):
        x = values[-1] if random.random() < 0.7 else random.choice(values)
        columns = x.shape[3]
        stride = random.choice([1, 2]) if columns >= 4 else 1
        match random.choice(["conv", "conv", "conv", "max", "avg", "relu", "add", "concat"]):
            case "conv":
                rows = random.choice([1, 3])
                groups = random.choice([1, 2])
                kernel = (2, x.shape[1] // groups, rows, 3)
                w = leaf("weight", tensor_type(kernel, "f64"), name=f"w{i}").result
                attributes = {"stride": (stride, stride), "padding": (rows // 2, 1), "dilation": (1, 1)}
                values.append(apply("conv2d", [x, w], {**attributes, "groups": groups}).result)
            case "max":
                attributes = {"kernel": (3, 2), "stride": (stride, stride), "padding": (1, 0), "dilation": (1, 1)}
                values.append(apply("max_pool2d", [x], attributes).result if columns > 1 else x)
            case "avg":
                attributes = {"kernel": (3, 3), "stride": (stride, stride), "padding": (1, 1)}
                values.append(apply("avg_pool2d", [x], attributes).result)
            case "relu":
                values.append(apply("relu", [x]).result)
            case kind:
                y = random.choice([v for v in values if v.shape == x.shape])
                values.append(apply(kind, [x, y], {"dim": 1} if kind == "concat" else {}).result)
    last = values[-1]
    w = leaf("weight", tensor_type(last.shape, "f64"), name="scale").result
    target = leaf("input", tensor_type(last.shape, "f64"), name="target")
    loss = apply("mse", [apply("mul", [last, w]).result, target.result]).result
    return Graph("cnn", (*inputs, target), (loss,))


def data_for(graph: Graph, seed: int = 0) -> tuple[dict[str, Array], dict[str, Array]]:
    """Random inputs and weights by name."""
    random = np.random.default_rng(seed)
    inputs = {n.name: random.standard_normal(n.types[0].shape) for n in graph.inputs}
    return inputs, {n.name: 0.5 * random.standard_normal(n.types[0].shape) for n in graph.weights()}
