"""Experts of a mixture, as several models of the zoo have them: gated MLPs of which each token goes to a few."""

from __future__ import annotations

from dataclasses import dataclass, field

from unity_ir.errors import UnityError
from unity_ir.models.builder import Builder
from unity_ir.pcg.node import Value


@dataclass(frozen=True, slots=True)
class Mixture:
    """
    How the experts of a model take tokens, which come in groups, and the balance losses of its layers so far.

    An expert takes of each group at most `capacity` per cent of an even share, rounded up, and drops the rest; with
    `capacity` 0 it takes all. `group` is the number of tokens of a group, and `balance` the weight of each balance
    loss, in ten-thousandths.
    """

    b: Builder
    capacity: int
    group: int
    balance: int
    losses: list[Value] = field(default_factory=list[Value])

    @staticmethod
    def of(b: Builder, tokens: Value, capacity: int, group: int, balance: int) -> Mixture:
        """
        Return what the keys `capacity`, `group` and `balance` of a model ask for, at tokens [batch, sequence]. With
        `group` 0, a group is a sample.

        Raises `UnityError` for a group that does not divide the tokens, and for one that nothing uses.
        """
        batch, sequence = tokens.shape
        if group and not capacity and not balance:
            raise UnityError(f"--model: {b.name}: group is {group}, but there is no capacity and no balance to use it")
        group = group or sequence
        if batch * sequence % group:
            raise UnityError(f"--model: {b.name}: group is {group}; it must divide the {batch * sequence} tokens")
        return Mixture(b, capacity, group, balance)

    def slots(self, chosen: int, experts: int) -> int:
        """
        Return how many tokens of a group each of `experts` experts takes where each token goes to `chosen` of them: no
        more than there are.
        """
        return min(-(-self.capacity * self.group * chosen // (100 * experts)), self.group)

    def balanced(self, gates: Value, indices: Value) -> None:
        """Add the balance loss of a layer with these gates and chosen experts (`balance_loss`), if it has a weight."""
        if self.balance:
            self.losses.append(balance_loss(self.b, gates, indices, gates.shape[0] // self.group))

    def added_to(self, loss: Value) -> Value:
        """Return a model's loss plus the balance losses of its layers, each times its weight."""
        for each in self.losses:
            loss = self.b.op("add", loss, self.b.op("scale", each, by=self.balance * 1e-4))
        return loss


def chosen_shares(b: Builder, gates: Value, chosen: int) -> tuple[Value, Value]:
    """
    Return the `chosen` experts of largest gate for each token, and their gates scaled to sum to 1, [tokens, chosen]
    both, from gates [tokens, experts].
    """
    values, indices = b.results("topk", gates, k=chosen)
    return indices, scaled_to_one(b, values)


def scaled_to_one(b: Builder, shares: Value) -> Value:
    """Return shares [tokens, chosen] divided by their sum for each token."""
    total = b.op("reshape", b.op("reduce_sum", shares, dim=1), shape=(shares.shape[0], 1))
    return b.op("div", shares, total)


def chosen_experts(
    mixture: Mixture,
    x: Value,
    indices: Value,
    shares: Value,
    name: str,
    experts: int,
    intermediate: int,
    parts: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
) -> Value:
    """
    Return the sum of experts' results, each times its share, [tokens, hidden], for tokens `x` [tokens, hidden]: of the
    experts `indices` [tokens, chosen] with `shares` [tokens, chosen]. Each token is computed by its experts only;
    what exceeds the capacity of an expert is dropped, if `mixture` has one.

    The weights of all `experts` are stacked, `{name}.{part}.weight`, for the names of the gate's, the other input's and
    the output's product, `parts`; `intermediate` is the width of an expert.
    """
    b, (tokens, hidden), chosen = mixture.b, x.shape, indices.shape[1]

    def gated(x: Value, operator: str, *routes: Value) -> Value:
        """Return the experts' gated MLPs of `x` [.., hidden], which `operator` multiplies by a stack of weights."""

        def product(x: Value, part: str, size: int) -> Value:
            return b.op(operator, x, b.weight(f"{name}.{part}.weight", experts, x.shape[-1], size), *routes)

        gate, up, down = parts
        h = b.op("mul", b.op("silu", product(x, gate, intermediate)), product(x, up, intermediate))
        return product(h, down, hidden)

    if not mixture.capacity:
        each = gated(b.op("expand", x, dim=1, sizes=(chosen,), degrees=(1,)), "routed_matmul", indices)
        return b.op("reduce_sum", b.op("mul", each, b.op("reshape", shares, shape=(tokens, chosen, 1))), dim=1)
    groups, slots = tokens // mixture.group, mixture.slots(chosen, experts)
    x = b.op("reshape", x, shape=(groups, mixture.group, hidden))
    indices, shares = (b.op("reshape", v, shape=(groups, mixture.group, chosen)) for v in (indices, shares))
    # All first choices of a group are before the second ones.
    indices, shares = (b.op("transpose", v, perm=(0, 2, 1)) for v in (indices, shares))
    each = (groups, chosen * mixture.group)
    number = b.op("reshape", b.op("queue", b.op("reshape", indices, shape=each)), shape=indices.shape)
    at = b.op("slot", indices, number, capacity=slots)
    once = b.op("in_slots", b.full(1.0, *shares.shape), number, capacity=slots)
    h = b.op("to_slots", x, at, once, size=experts * slots, degrees=(1,))
    h = gated(b.op("reshape", h, shape=(experts, slots, groups, hidden)), "expert_matmul")
    h = b.op("reshape", h, shape=(experts * slots, groups, hidden))
    h = b.op("from_slots", h, at, b.op("in_slots", shares, number, capacity=slots))
    return b.op("reshape", h, shape=(tokens, hidden))


def balance_loss(b: Builder, gates: Value, indices: Value, groups: int) -> Value:
    """
    Return a scalar that is 1 where each of `groups` groups chooses all experts equally often: the mean over groups of
    `sum[e](f[e] * p[e])`. `f[e]` is the share of the choices `indices` [tokens, chosen] that are of expert e, times the
    number of experts; `p[e]` is the mean of its `gates` [tokens, experts], which sum to 1 for each token (Fedus 2021,
    section 2.2; of DeepSeek-V3, section 2.1.2, the loss of each sequence).

    Gradients flow through the gates alone. As it is a mean over groups, groups can be divided, also in time.
    """
    (tokens, experts), chosen = gates.shape, indices.shape[1]
    shape = groups, tokens // groups, experts
    counts = b.op("scatter_add", b.full(0.0, tokens, experts), indices, b.full(1.0, tokens, chosen), dim=1)
    counts = b.op("reduce_sum", b.op("reshape", counts, shape=shape), dim=1)
    means = b.op("reduce_mean", b.op("reshape", gates, shape=shape), dim=1)
    loss = b.op("reduce_mean", b.op("reduce_sum", b.op("mul", counts, means), dim=1), dim=0)
    return b.op("scale", loss, by=experts / (shape[1] * chosen))
