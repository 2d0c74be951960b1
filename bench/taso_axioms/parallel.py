"""
What holds between parallel operators and compute operators, and what does not, for all sizes and degrees.

The true statements are proved; the false ones are refuted, most of them because they have no types here: a value in
partial sums may not go through a relu, for one. `note` says where a statement is the nearest that can be written:
pieces cannot be stacked by hand, and a value has addends only where an operator made them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from taso_axioms.taso import Axiom, add, cat, matmul, max_pool, mul, relu, turn
from taso_axioms.terms import combine, op, partition, reduce, replicate, results, rule, tensor
from unity_ir.rules.pattern import ResultOf, Term


def statements() -> tuple[Axiom, ...]:
    """All of them: the true ones and, with numbers that end in `not`, the false ones."""
    return (
        *(*_structure(), *_elementwise(), *_bias(), *_matmul(), *_convolution()),
        *(*_shape(), *_axes(), *_embedding(), *_attention(), *_collectives()),
    )


def pad(x: Term, by: str = "d") -> ResultOf:
    """As one addend of `by`, the others zero."""
    return op("zero_pad", x, by=by)


def pick(x: Term, by: str = "d") -> ResultOf:
    """One of the copies."""
    return op("pick", x, by=by)


def addends(name: str, shape: str = "n m") -> Term:
    """An input in d partial sums."""
    return tensor(name, shape, sum="d")


def _structure() -> Iterator[Axiom]:
    x, s = tensor("x", "a.. d*m b.."), tensor("s", "a.. d*m b..", degrees="1 d 1")
    yield Axiom("A1", "Comb(Part x) = x", rule("combine-partition", combine(partition(x, "#a"), "#a"), x))
    yield Axiom("A2", "Part(Comb s) = s", rule("partition-combine", partition(combine(s, "#a"), "#a"), s))
    y = tensor("x", "d*n e*m")
    both = partition(partition(y, 0), 1, "e"), partition(partition(y, 1, "e"), 0)
    yield Axiom("A3", "Part_a Part_b x = Part_b Part_a x", rule("partition-partition", *both))
    y = tensor("x", "d*e*n m")
    both = partition(partition(y, 0), 0, "e"), partition(y, 0, "d*e")
    yield Axiom("A4", "Part(Part x) = Part(x, d e)", rule("partition-twice", *both))
    x, s = tensor("x", "n d*m"), tensor("s", "n d*m", degrees="1 d")
    both = replicate(replicate(x), "e"), replicate(x, "d*e")
    yield Axiom("A5", "Repl(Repl x) = Repl(x, d e)", rule("replicate-twice", *both))
    p = tensor("p", "n m", sum="d*e")
    yield Axiom(
        "A6", "Reduce(Reduce p) = Reduce(p, d e)", rule("reduce-twice", reduce(reduce(p), "e"), reduce(p, "d*e"))
    )
    both = partition(replicate(x, "e"), 1), replicate(partition(x, 1), "e")
    yield Axiom("A7", "Part(Repl x) = Repl(Part x)", rule("partition-replicate", *both))
    both = combine(replicate(s, "e"), 1), replicate(combine(s, 1), "e")
    yield Axiom("A8", "Comb(Repl s) = Repl(Comb s)", rule("combine-replicate", *both))
    p = tensor("p", "n d*m", sum="e")
    both = reduce(partition(p, 1), "e"), partition(reduce(p, "e"), 1)
    yield Axiom("A9", "Reduce(Part p) = Part(Reduce p)", rule("reduce-partition", *both))
    p = tensor("p", "n d*m", degrees="1 d", sum="e")
    both = reduce(combine(p, 1), "e"), combine(reduce(p, "e"), 1)
    yield Axiom("A10", "Reduce(Comb p) = Comb(Reduce p)", rule("reduce-combine", *both))
    note = "copies cannot be added up; addends of which all but one are zero can"
    yield Axiom("A11", "Reduce(Repl x) = d x", rule("reduce-zero-pad", reduce(pad(x)), x), note=note)
    yield Axiom("A11 not", "Reduce(Repl x) = x", rule("reduce-replicate", reduce(replicate(x)), x), "refuted")
    c = tensor("x", "n m", copy="d")
    yield Axiom("A11 typed not", "Reduce(c) = pick c", rule("reduce-copies", reduce(c), pick(c)), "refuted")
    yield Axiom("A12", "pick(Repl x) = x", rule("pick-replicate", pick(replicate(x)), x))


def _elementwise() -> Iterator[Axiom]:
    x, y = tensor("x", "a.. d*m b.."), tensor("y", "a.. d*m b..")
    s, p, q = tensor("s", "a.. d*m b..", degrees="1 d 1"), addends("p"), addends("q")
    both = relu(partition(x, "#a")), partition(relu(x), "#a")
    yield Axiom("B1", "f(Part x) = Part f(x)", rule("relu-partition", *both))
    both = relu(combine(s, "#a")), combine(relu(s), "#a")
    yield Axiom("B2", "f(Comb s) = Comb f(s)", rule("relu-combine", *both))
    yield Axiom("B3", "f(Repl x) = Repl f(x)", rule("relu-replicate", relu(replicate(x)), replicate(relu(x))))
    both = relu(reduce(p)), reduce(relu(p))
    yield Axiom("B3 not", "relu(Reduce p) = Reduce(relu p)", rule("relu-reduce", *both), "refuted")
    both = mul(partition(x, "#a"), partition(y, "#a")), partition(mul(x, y), "#a")
    yield Axiom("B4", "g(Part x, Part y) = Part g(x, y)", rule("mul-partition", *both))
    both = add(partition(x, "#a"), partition(y, "#a")), partition(add(x, y), "#a")
    yield Axiom("B4 add", "Part x + Part y = Part(x + y)", rule("add-partition", *both), note="added: B4 of a sum")
    both = mul(replicate(x), replicate(y)), replicate(mul(x, y))
    yield Axiom("B5", "g(Repl x, Repl y) = Repl g(x, y)", rule("mul-replicate", *both))
    both = add(reduce(p), reduce(q)), reduce(add(p, q))
    yield Axiom("B6", "Reduce p + Reduce q = Reduce(p + q)", rule("add-reduce", *both))
    both = mul(reduce(p), reduce(q)), reduce(mul(p, q))
    yield Axiom("B6 not", "Reduce p * Reduce q = Reduce(p * q)", rule("mul-reduce-reduce", *both), "refuted")
    z = tensor("y", "n m")
    both = mul(reduce(p), z), reduce(mul(p, replicate(z)))
    yield Axiom("B7", "Reduce p * y = Reduce(p * Repl y)", rule("mul-reduce", *both))
    both = op("scale", reduce(p), by="$by"), reduce(op("scale", p, by="$by"))
    yield Axiom("B8", "s(Reduce p) = Reduce(s(p))", rule("scale-reduce", *both))


def _bias() -> Iterator[Axiom]:
    x, y, b, p = tensor("x", "d*n m"), tensor("x", "n d*m"), tensor("b", "m"), addends("p")
    both = add(partition(x, 0), replicate(b)), partition(add(x, b), 0)
    yield Axiom("B9", "Part_0 x + Repl b = Part_0(x + b)", rule("bias-rows", *both))
    c = tensor("b", "d*m")
    both = add(partition(y, 1), partition(c, 0)), partition(add(y, c), 1)
    yield Axiom("B10", "Part_1 x + Part_0 b = Part_1(x + b)", rule("bias-columns", *both))
    both = add(reduce(p), b), reduce(add(p, replicate(b)))
    yield Axiom("B11 not", "Reduce p + b = Reduce(p + Repl b)", rule("bias-replicate", *both), "refuted")
    both = add(reduce(p), b), reduce(add(p, pad(b)))
    yield Axiom("B11", "Reduce p + b = Reduce(p + Pad b)", rule("bias-reduce", *both))
    x, y = tensor("x", "n m"), tensor("y", "n m")
    note = "two values cannot be stacked as addends; each can be made one addend of d"
    yield Axiom(
        "B12", "x + y = Reduce(stack(x, y))", rule("add-pad", add(x, y), reduce(add(pad(x), pad(y)))), note=note
    )


def _matmul() -> Iterator[Axiom]:
    x, w = tensor("x", "d*n k"), tensor("w", "k m")
    both = matmul(partition(x, 0), replicate(w)), partition(matmul(x, w), 0)
    yield Axiom("C1", "mm(Part_n x, Repl w) = Part_n mm(x, w)", rule("matmul-rows", *both))
    x, w = tensor("x", "n k"), tensor("w", "k d*m")
    both = matmul(replicate(x), partition(w, 1)), partition(matmul(x, w), 1)
    yield Axiom("C2", "mm(Repl x, Part_m w) = Part_m mm(x, w)", rule("matmul-columns", *both))
    x, w = tensor("x", "n d*k"), tensor("w", "d*k m")
    both = reduce(matmul(partition(x, 1), partition(w, 0))), matmul(x, w)
    yield Axiom("C3", "Reduce(mm(Part_k x, Part_k w)) = mm(x, w)", rule("matmul-sum", *both))
    both = reduce(matmul(partition(x, 1), replicate(w))), matmul(x, w)
    yield Axiom("C3 not", "Reduce(mm(Part_k x, Repl w)) = mm(x, w)", rule("matmul-half", *both), "refuted")
    x, w, p, q = tensor("x", "n m"), tensor("w", "m l"), addends("p"), addends("q", "m l")
    both = matmul(reduce(p), w), reduce(matmul(p, replicate(w)))
    yield Axiom("C4", "mm(Reduce p, w) = Reduce(mm(p, Repl w))", rule("matmul-reduce-left", *both))
    both = matmul(x, reduce(q)), reduce(matmul(replicate(x), q))
    yield Axiom("C5", "mm(x, Reduce p) = Reduce(mm(Repl x, p))", rule("matmul-reduce-right", *both))
    both = matmul(replicate(x), replicate(w)), replicate(matmul(x, w))
    yield Axiom("C6", "mm(Repl x, Repl w) = Repl mm(x, w)", rule("matmul-replicate", *both))
    x, y = tensor("x", "d*b n k"), tensor("y", "d*b k m")
    both = op("batch_matmul", partition(x, 0), partition(y, 0)), partition(op("batch_matmul", x, y), 0)
    yield Axiom("C7", "bmm(Part_b x, Part_b y) = Part_b bmm(x, y)", rule("batch-matmul", *both))
    x, v, w = tensor("x", "n k"), tensor("v", "k d*m"), tensor("w", "d*m l")
    divided = reduce(matmul(relu(matmul(replicate(x), partition(v, 1))), partition(w, 0)))
    yield Axiom("C8", "Megatron's perceptron", rule("perceptron", divided, matmul(relu(matmul(x, v)), w)))


def conv(x: Term, w: Term, **attributes: str) -> ResultOf:
    given = {"stride": "s t", "padding": "f-1 g-1", "dilation": "1 1", **attributes}
    return op("conv2d", x, w, **given)


def _convolution() -> Iterator[Axiom]:
    x, w = tensor("x", "d*n c h l"), tensor("w", "o c i j")
    both = conv(partition(x, 0), replicate(w)), partition(conv(x, w), 0)
    yield Axiom("D1", "conv(Part_n x, Repl w) = Part_n conv(x, w)", rule("conv-samples", *both))
    x, w = tensor("x", "n c h l"), tensor("w", "d*o c i j")
    both = conv(replicate(x), partition(w, 0)), partition(conv(x, w), 1)
    yield Axiom("D2", "conv(Repl x, Part_o w) = Part_o conv(x, w)", rule("conv-channels", *both))
    x, w = tensor("x", "n d*c h l"), tensor("w", "o d*c i j")
    both = reduce(conv(partition(x, 1), partition(w, 1))), conv(x, w)
    yield Axiom("D3", "Reduce(conv(Part_c x, Part_c w)) = conv(x, w)", rule("conv-sum", *both))
    x, w = tensor("x", "n d*g h l"), tensor("w", "d*g*o 1 i j")
    both = conv(partition(x, 1), partition(w, 0), groups="d*g"), partition(conv(x, w, groups="d*g"), 1)
    note = "depthwise: groups are divided where each is a channel"
    yield Axiom("D4", "conv_g(Part_c x, Part_o w) = Part_c conv_g(x, w)", rule("conv-groups", *both), note=note)
    x, w = tensor("x", "n c d*h l"), tensor("w", "o c 2*a+1 j")
    same = {"stride": "1 1", "padding": "a 0"}
    both = conv(partition(x, 2), replicate(w), **same), partition(conv(x, w, **same), 2)
    yield Axiom("D5 not", "conv(Part_h x, Repl w) = Part_h conv(x, w)", rule("conv-rows", *both), "refuted")
    halo = op("halo", partition(x, 2), dim=2, low="a", high="a")
    both = conv(halo, replicate(w), **same), partition(conv(x, w, **same), 2)
    yield Axiom("D5", "conv(Halo(Part_h x), Repl w) = Part_h conv(x, w)", rule("conv-rows-halo", *both), note="added")
    w = tensor("w", "o c 1 1")
    same = {"stride": "1 1", "padding": "0 0"}
    both = conv(partition(x, 2), replicate(w), **same), partition(conv(x, w, **same), 2)
    yield Axiom("D6", "conv1x1(Part_h x, Repl w) = Part_h conv1x1(x, w)", rule("conv-points-rows", *both))
    x = tensor("x", "d*n e*c h l")

    def divided(y: Term) -> ResultOf:
        return partition(partition(y, 0), 1, "e")

    yield Axiom("D7", "pool(Part_n,c x) = Part_n,c pool(x)", rule("pool", max_pool(divided(x)), divided(max_pool(x))))


def _shape() -> Iterator[Axiom]:
    x, y = tensor("x", "d*n m"), tensor("y", "d*n l")
    both = cat(1, partition(x, 0), partition(y, 0)), partition(cat(1, x, y), 0)
    yield Axiom("E1", "cat_a(Part_b x, Part_b y) = Part_b cat_a(x, y)", rule("concat-partition", *both))
    x, y = tensor("x", "n d*m"), tensor("y", "n d*l")
    both = cat(1, partition(x, 1), partition(y, 1)), partition(cat(1, x, y), 1)
    yield Axiom("E1 not", "cat_a(Part_a x, Part_a y) = Part_a cat_a(x, y)", rule("concat-along", *both), "refuted")
    both = cat(1, replicate(x), replicate(y)), replicate(cat(1, x, y))
    yield Axiom("E2", "cat(Repl x, Repl y) = Repl cat(x, y)", rule("concat-replicate", *both))
    p, q = addends("p"), addends("q", "n l")
    both = cat(1, reduce(p), reduce(q)), reduce(cat(1, p, q))
    yield Axiom("E3", "cat(Reduce p, Reduce q) = Reduce cat(p, q)", rule("concat-reduce", *both))

    def parts(of: Term) -> tuple[ResultOf, ...]:
        return results("split", 2, of, dim=1, sizes="m l")

    x, p = tensor("x", "d*n m+l"), addends("p", "n m+l")
    both = parts(partition(x, 0)), tuple(partition(y, 0) for y in parts(x))
    yield Axiom("E4", "split_a(Part_b x) = Part_b split_a(x)", rule("split-partition", *both))
    both = parts(reduce(p)), tuple(map(reduce, parts(p)))
    yield Axiom("E5", "split(Reduce p) = Reduce split(p)", rule("split-reduce", *both))
    x, p = tensor("x", "d*n m"), addends("p")
    both = turn(partition(x, 0)), partition(turn(x), 1)
    yield Axiom("E6", "(Part_0 x)^T = Part_1 x^T", rule("transpose-partition", *both))
    yield Axiom("E7", "(Reduce p)^T = Reduce p^T", rule("transpose-reduce", turn(reduce(p)), reduce(turn(p))))

    def rows(of: Term, size: str) -> ResultOf:
        return op("reshape", of, shape=size)

    x = tensor("x", "d*n m l")
    both = rows(partition(x, 0), "d*n*m l"), partition(rows(x, "d*n*m l"), 0)
    yield Axiom("E8", "merge(Part_n x) = Part_0 merge(x)", rule("reshape-outer", *both))
    x = tensor("x", "n d*m l")
    both = rows(partition(x, 1), "d*n*m l"), partition(rows(x, "d*n*m l"), 0)
    yield Axiom("E8 not", "merge(Part_s x) = Part_0 merge(x)", rule("reshape-inner", *both, "n-2"), "refuted")


def _axes() -> Iterator[Axiom]:
    """Operators along one dim."""
    x, y = tensor("x", "d*n m"), tensor("x", "n d*m")

    def softmax(of: Term) -> ResultOf:
        return op("softmax", of)

    both = softmax(partition(x, 0)), partition(softmax(x), 0)
    yield Axiom("F1", "softmax(Part_b x) = Part_b softmax(x)", rule("softmax-rows", *both))
    both = softmax(partition(y, 1)), partition(softmax(y), 1)
    yield Axiom("F1 not", "softmax(Part_c x) = Part_c softmax(x)", rule("softmax-along", *both), "refuted")
    w, b = tensor("w", "m"), tensor("b", "m")
    left = op("layer_norm", partition(x, 0), replicate(w), replicate(b), eps="$eps")
    both = left, partition(op("layer_norm", x, w, b, eps="$eps"), 0)
    yield Axiom("F2", "layer_norm(Part_b x) = Part_b layer_norm(x)", rule("layer-norm-rows", *both))
    image, center = tensor("x", "d*n c h l"), tensor("m", "1 c")
    divided = results("batch_stats", 2, partition(image, 0), replicate(center))
    both = divided, results("batch_stats", 2, image, center)
    yield Axiom("F2 not", "batch_stats(Part_n x) = batch_stats(x)", rule("batch-stats", *both), "refuted")
    summed = tuple(reduce(y) for y in both[0]), both[1]
    statement = "Reduce(batch_stats(Part_n x)) = batch_stats(x)"
    yield Axiom("F2 sum", statement, rule("batch-stats-sum", *summed), note="added: statistics of the whole batch")

    def total(of: Term, kind: str = "sum") -> ResultOf:
        return op(f"reduce_{kind}", of, dim=1)

    yield Axiom("F3", "Reduce(sum_a(Part_a x)) = sum_a x", rule("sum-along", reduce(total(partition(y, 1))), total(y)))
    both = reduce(total(partition(y, 1), "mean")), total(y, "mean")
    note = "the mean is over the whole dim, so nothing is divided by d"
    yield Axiom("F4", "Reduce(mean_a(Part_a x)) / d = mean_a x", rule("mean-along", *both), note=note)
    both = total(partition(x, 0)), partition(total(x), 0)
    yield Axiom("F5", "sum_a(Part_b x) = Part_b sum_a(x)", rule("sum-rows", *both))


def _embedding() -> Iterator[Axiom]:
    def rows(ids: Term, table: Term) -> ResultOf:
        return op("embedding", ids, table)

    ids, table = tensor("i", "d*n a..", elements="int"), tensor("t", "v e")
    both = rows(partition(ids, 0), replicate(table)), partition(rows(ids, table), 0)
    yield Axiom("G1", "emb(Part_n i, Repl t) = Part_n emb(i, t)", rule("embedding-rows", *both))
    ids, table = tensor("i", "n s", elements="int"), tensor("t", "v d*e")
    both = rows(replicate(ids), partition(table, 1)), partition(rows(ids, table), 2)
    yield Axiom("G2", "emb(Repl i, Part_e t) = Part_e emb(i, t)", rule("embedding-columns", *both))
    table = tensor("t", "d*v e")
    both = reduce(rows(replicate(ids), partition(table, 0))), rows(ids, table)
    note = "a piece of the table has no row for the other pieces' numbers: the mask is in the line"
    yield Axiom("G3", "Reduce(emb(Repl i, Part_v t)) = emb(i, t)", rule("embedding-sum", *both), note=note)


def _attention() -> Iterator[Axiom]:
    """Of heads h over x [b, s, k]: projections, attention, and the projection back."""

    def heads(x: Term, w: Term, count: str) -> ResultOf:
        return op("split_heads", matmul(x, w), heads=count)

    def attention(x: Term, weights: Sequence[Term], back: Term, count: str) -> ResultOf:
        queries, keys, values = (heads(x, w, count) for w in weights)
        return matmul(op("merge_heads", op("attention", queries, keys, values, scale="$scale")), back)

    x, back = tensor("x", "d*b s k"), tensor("o", "h*e k")
    weights = [tensor(n, "k h*e") for n in "qkv"]
    left = attention(partition(x, 0), [replicate(w) for w in weights], replicate(back), "h")
    both = left, partition(attention(x, weights, back, "h"), 0)
    yield Axiom("H1", "mha(Part_n x, Repl w) = Part_n mha(x, w)", rule("attention-samples", *both))
    x, back = tensor("x", "b s k"), tensor("o", "d*h*e k")
    weights = [tensor(n, "k d*h*e") for n in "qkv"]
    left = attention(replicate(x), [partition(w, 1) for w in weights], partition(back, 0), "d*h")
    both = reduce(left), attention(x, weights, back, "d*h")
    yield Axiom("H2", "Reduce(mha(Repl x, Part_h w)) = mha(x, w)", rule("attention-heads", *both))


def _collectives() -> Iterator[Axiom]:
    p = addends("p", "d*n m")
    both = replicate(reduce(p)), replicate(combine(partition(reduce(p), 0), 0))
    yield Axiom("I1", "Repl(Reduce p) = Repl(Comb(Part(Reduce p)))", rule("all-reduce", *both))
