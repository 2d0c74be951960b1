"""Rules as a library has them: each follows from several axioms."""

from __future__ import annotations

from collections.abc import Iterator

from taso_axioms.parallel import conv
from taso_axioms.taso import add, cat, matmul, mul, relu, turn
from taso_axioms.terms import combine, op, partition, reduce, replicate, results, rule, tensor
from unity_ir.rules.pattern import Substitution


def composites() -> tuple[Substitution, ...]:
    """All of them, algebraic ones first."""
    return (*_algebraic(), *_products(), *_joint())


def _algebraic() -> Iterator[Substitution]:
    x, v, w = tensor("x", "a.. k"), tensor("v", "k n"), tensor("w", "k m")
    merged = results("split", 2, matmul(x, cat(1, v, w)), dim="#a", sizes="n m")
    yield rule("merge-matmuls", (matmul(x, v), matmul(x, w)), merged)
    yield rule("merge-matmul-relus", (relu(matmul(x, v)), relu(matmul(x, w))), (relu(merged[0]), relu(merged[1])))
    image, v, w = tensor("x", "n c h l"), tensor("v", "o c i j"), tensor("w", "p c i j")
    merged = results("split", 2, conv(image, cat(0, v, w)), dim=1, sizes="o p")
    yield rule("merge-convs", (conv(image, v), conv(image, w)), merged)
    x, y = tensor("x", "n k"), tensor("y", "m k")
    merged = results("split", 2, relu(cat(0, x, y)), dim=0, sizes="n m")
    yield rule("merge-relus", (relu(x), relu(y)), merged)
    x, y, z = (tensor(n, "n k") for n in "xyz")
    yield rule("add-rotate", add(x, add(y, z)), add(z, add(x, y)))
    yield rule("mul-factor", add(mul(x, y), mul(x, z)), mul(x, add(z, y)))
    w = tensor("w", "k m")
    yield rule("matmul-factor", add(matmul(x, w), matmul(y, w)), matmul(add(x, y), w))
    v = tensor("v", "k l")
    yield rule(
        "transpose-out", turn(matmul(x, add(w, tensor("u", "k m")))), matmul(turn(add(w, tensor("u", "k m"))), turn(x))
    )


def _products() -> Iterator[Substitution]:
    x, y, z = tensor("x", "n k"), tensor("y", "n k"), tensor("z", "n k")
    u, v, w = tensor("u", "k m"), tensor("v", "k m"), tensor("w", "k m")
    yield rule(
        "three-products",
        add(matmul(x, u), add(matmul(y, v), matmul(z, w))),
        matmul(cat(1, x, cat(1, y, z)), cat(0, u, cat(0, v, w))),
    )
    yield rule("relu-of-products", relu(add(matmul(x, u), matmul(y, v))), relu(matmul(cat(1, x, y), cat(0, u, v))))
    s = tensor("s")
    yield rule("scale-through", matmul(mul(x, s), add(u, v)), mul(add(matmul(x, u), matmul(x, v)), s))
    a, b, c = tensor("a", "n k"), tensor("b", "k l"), tensor("c", "l m")
    yield rule("transpose-three", turn(matmul(a, matmul(b, c))), matmul(turn(c), matmul(turn(b), turn(a))))


def _joint() -> Iterator[Substitution]:
    x, w = tensor("x", "d*n k"), tensor("w", "k m")
    divided = combine(matmul(partition(x, 0), replicate(w)), 0)
    yield rule("partition-linear-combine", matmul(x, w), divided)
    yield rule(
        "partition-linear-relu-combine", relu(matmul(x, w)), combine(relu(matmul(partition(x, 0), replicate(w))), 0)
    )
    x, w = tensor("x", "n k"), tensor("w", "k d*m")
    divided = combine(matmul(replicate(x), partition(w, 1)), 1)
    yield rule("replicate-linear-combine", matmul(x, w), divided)
    b = tensor("b", "d*m")
    yield rule(
        "replicate-linear-bias-combine",
        add(matmul(x, w), b),
        combine(add(matmul(replicate(x), partition(w, 1)), partition(b, 0)), 1),
    )
    x, y = tensor("x", "n d*k"), tensor("y", "n d*k")
    yield rule("partition-add-combine", add(x, y), combine(add(partition(x, 1), partition(y, 1)), 1))
    yield rule("partition-relu-combine", relu(x), combine(relu(partition(x, 1)), 1))
    x, v, w = tensor("x", "n k"), tensor("v", "k d*m"), tensor("w", "d*m l")
    hidden = relu(matmul(replicate(x), partition(v, 1)))
    yield rule("perceptron-reduce", matmul(relu(matmul(x, v)), w), reduce(matmul(hidden, partition(w, 0))))
    x, w = tensor("x", "n d*k"), tensor("w", "d*k m")
    yield rule(
        "all-reduce-product",
        replicate(matmul(x, w)),
        replicate(combine(partition(reduce(matmul(partition(x, 1), partition(w, 0))), 1, "e"), 1, "e")),
    )
    image, w = tensor("x", "d*n c h l"), tensor("w", "o c i j")
    yield rule("partition-conv-combine", conv(image, w), combine(conv(partition(image, 0), replicate(w)), 0))
    x = tensor("x", "d*n m")
    yield rule("partition-softmax-combine", op("softmax", x), combine(op("softmax", partition(x, 0)), 0))
    p, q = tensor("p", "n k", sum="d"), tensor("q", "n k", sum="d")
    w = tensor("w", "k m")
    yield rule("late-reduce", matmul(add(reduce(p), reduce(q)), w), reduce(matmul(add(p, q), replicate(w))))
