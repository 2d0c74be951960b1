"""
The optimizers: the step of each is one TDL line, from which its kernels, its state and its hyperparameters follow.

A line's operands are the weight `p`, its gradient `g`, and tensors of the weight's shape that are kept from step to
step (the state); its attributes are `step`, counted from 1, if it reads it, and the hyperparameters with their
defaults. Its results without an index are numbers, computed once. The others replace the operands they are named as, in
this order: an expression does not read what one before it replaced, but may repeat all of that one's expression.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from types import MappingProxyType

from unity_ir.tdl.parse import parse_line
from unity_ir.tdl.syntax import Line, WrittenResult


@dataclass(frozen=True)
class OptimizerLine:
    """
    One step of an optimizer on one weight, as a TDL line. Its operands are the weight, the gradient, and what the
    optimizer keeps from step to step (its state).
    """

    text: str

    @cached_property
    def line(self) -> Line:
        """The TDL line, parsed."""
        return parse_line(self.text)

    @property
    def name(self) -> str:
        """The optimizer's name, such as `adamw`."""
        return self.text.partition("(")[0]

    @cached_property
    def state(self) -> tuple[str, ...]:
        """The names of the operands that are kept from step to step (all but weight and gradient), in order."""
        return tuple(p.name for p in self.line.parameters[2:])

    @cached_property
    def reads_step(self) -> bool:
        """Whether the line uses the number of the present step, as the bias correction of `adam` does."""
        return any(a.name == "step" for a in self.line.attributes)

    @cached_property
    def defaults(self) -> Mapping[str, float]:
        """The default value of each hyperparameter, by name, in the line's order."""
        given = {a.name: a.default for a in self.line.attributes if a.name != "step"}
        return MappingProxyType({name: float(value) for name, value in given.items() if isinstance(value, int | float)})

    @property
    def numbers(self) -> tuple[WrittenResult, ...]:
        """The results that are single numbers, the same for all elements of a weight, such as `step_size` of `adam`."""
        return tuple(r for r in self.line.results if not r.indices)

    @property
    def replaced(self) -> tuple[WrittenResult, ...]:
        """
        The results that are the new values of the weight and its state, in the line's order. Each has the name of the
        operand that it replaces.
        """
        return tuple(r for r in self.line.results if r.indices)


@lru_cache(maxsize=16)
def with_average(of: OptimizerLine) -> OptimizerLine:
    """
    Return the line of an optimizer that also keeps an exponential moving average of the weights, as the last of its
    state, with the hyperparameter `ema`, the part of it that stays in each step.

    The average is that of `torch.optim.swa_utils.AveragedModel` with `get_ema_multi_avg_fn(ema)`, brought up to date
    after each step: after the first it is the weight, since `keep` is 0 then.
    """
    head, _, body = of.text.partition(")")
    name, _, parameters = head.partition("(")
    tensors, _, numbers = parameters.partition(";")
    numbers = numbers if of.reads_step else f" step: int,{numbers}"
    weight = next(part.partition("=")[2] for part in body.split(";") if part.strip().startswith("p[i..]"))
    return OptimizerLine(
        f"{name}({tensors}, {AVERAGE};{numbers}, ema: float = 0){body};"
        " keep[] = ema * (1 - pow(0, step - 1)); take[] = 1 - ema * (1 - pow(0, step - 1));"
        f" {AVERAGE}[i..] = (ema * (1 - pow(0, step - 1))) * {AVERAGE}[i..]"
        f" + (1 - ema * (1 - pow(0, step - 1))) * ({weight})"
    )


AVERAGE = "average"
"""The name of the moving average of the weights in an optimizer's state."""


def _adam(name: str, setting: str, decay: str, decayed: str) -> OptimizerLine:
    return OptimizerLine(
        f"{name}(p, g, m, v; step: int, lr: float = 0.001, beta1: float = 0.9, beta2: float = 0.999,"
        f" eps: float = 1e-8{setting})"
        "  let rate[] = lr / (1 - pow(beta1, step));"
        "  let root[] = sqrt(1 - pow(beta2, step));"
        "  let mean[i..] = beta1 * m[i..] + (1 - beta1) * g[i..];"
        "  let square[i..] = beta2 * v[i..] + (1 - beta2) * g[i..] * g[i..];"
        f"  step_size[] = rate[]; root_correction[] = root[]; take1[] = 1 - beta1; take2[] = 1 - beta2;{decay}"
        "  m[i..] = mean[i..]; v[i..] = square[i..];"
        f"  p[i..] = p[i..]{decayed} - rate[] * mean[i..] / (sqrt(square[i..]) / root[] + eps)"
    )


_LINES = (
    OptimizerLine("sgd(p, g; lr: float = 0.001)  p[i..] = p[i..] - lr * g[i..]"),
    OptimizerLine(
        "momentum(p, g, m; lr: float = 0.001, momentum: float = 0.9, weight_decay: float = 0)"
        "  let mean[i..] = momentum * m[i..] + (g[i..] + weight_decay * p[i..]);"
        "  m[i..] = mean[i..]; p[i..] = p[i..] - lr * mean[i..]"
    ),
    _adam("adam", "", "", ""),
    _adam("adamw", ", weight_decay: float = 0.01", " decay[] = lr * weight_decay;", " - lr * weight_decay * p[i..]"),
    OptimizerLine(
        "lion(p, g, m; lr: float = 0.0001, beta1: float = 0.9, beta2: float = 0.99, weight_decay: float = 0)"
        "  let mean[i..] = beta1 * m[i..] + (1 - beta1) * g[i..];"
        "  take1[] = 1 - beta1; take2[] = 1 - beta2; decay[] = lr * weight_decay;"
        "  p[i..] = p[i..] - lr * weight_decay * p[i..]"
        " - lr * (where(gt(mean[i..], 0), 1, 0) - where(lt(mean[i..], 0), 1, 0));"
        "  m[i..] = beta2 * m[i..] + (1 - beta2) * g[i..]"
    ),
)
OPTIMIZERS: Mapping[str, OptimizerLine] = MappingProxyType({each.name: each for each in _LINES})
"""
The optimizers by name. `sgd`, `momentum` (SGD with momentum; Polyak, 1964), `adam` (Kingma and Ba, 2015) and `adamw`
(Loshchilov and Hutter, 2019) do what `torch.optim` does; `lion` is Chen et al., 2023, algorithm 2.
"""
