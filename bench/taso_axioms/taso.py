"""
TASO's axioms (verify.py; Jia et al., SOSP'19, Table 2) as substitutions over the operators here, for all sizes.

TASO takes them as true and has them tested at shapes up to 4; here each is proved, or refuted, by `proof.prove`. Its
numbers and statements are kept: x + y, x * y by elements, xy a product of matrices, s(x, w) x scaled by w, cat_a a
concatenation along axis a. An axiom that it states for convolutions with and without an activation is two here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from taso_axioms.terms import op, results, rule, tensor
from unity_ir.rules.pattern import ResultOf, Substitution, Term


@dataclass(frozen=True, slots=True)
class Axiom:
    """A statement, what it is here, and the verdict it must have; `note` where the two differ."""

    number: str
    statement: str
    rule: Substitution
    verdict: str = "proved"
    note: str = ""


# --- operators -------------------------------------------------------------------------------------------------------


def add(x: Term, y: Term) -> ResultOf:
    return op("add", x, y)


def mul(x: Term, y: Term) -> ResultOf:
    return op("mul", x, y)


def matmul(x: Term, y: Term) -> ResultOf:
    return op("matmul", x, y)


def relu(x: Term) -> ResultOf:
    return op("relu", x)


def turn(x: Term) -> ResultOf:
    """The transpose of a matrix."""
    return op("transpose", x, perm="1 0")


def cat(dim: int | str, *x: Term) -> ResultOf:
    return op("concat", *x, dim=dim)


def conv(x: Term, w: Term, groups: str = "1", stride: str = "s t", padding: str = "f-1 g-1") -> ResultOf:
    return op("conv2d", x, w, stride=stride, padding=padding, dilation="d e", groups=groups)


def max_pool(x: Term) -> ResultOf:
    return op("max_pool2d", x, kernel="i j", stride="s t", padding="f-1 g-1", dilation="d e")


def avg_pool(x: Term, kernel: str = "i j", stride: str = "s t", padding: str = "f-1 g-1") -> ResultOf:
    return op("avg_pool2d", x, kernel=kernel, stride=stride, padding=padding)


# --- constants -------------------------------------------------------------------------------------------------------


def ones(like: Term) -> ResultOf:
    """1 everywhere: exp(0 x)."""
    return op("exp", op("scale", like, by=0.0))


def channels(x: Term) -> ResultOf:
    """Ones, as many as an image [n, c, h, w] has channels."""
    return ones(op("reduce_sum", op("reduce_sum", x, dim=2, count=2), dim=0))


def identity(ones: Term, size: str) -> ResultOf:
    """
    The identity matrix over ones [size]: row j has a 1 at j.

    j is counted: all the ones, less those from j on.
    """
    # As numbers of 64 bits, of which every position is one.
    ones = op("cast", ones, to="f64")
    from_here_on = op("cumsum_grad", ones, dim=0, size=size, degrees="1")
    row = op("cast", op("sub", op("reduce_sum", ones, dim=0), from_here_on), to="i64")
    return op("cast", op("one_hot", row, classes=size), to="f64")


def enlarge(w: Term) -> ResultOf:
    """A kernel [o, c, i, j] in the middle of one of [o, c, 2a + i, 2b + j], zero around it."""
    return op("pad", op("pad", w, dim=2, before="a", after="a"), dim=3, before="b", after="b")


def pool_kernel(ones: Term, sizes: str = "i j") -> ResultOf:
    """The depthwise kernel [c, 1, i, j] of a mean, over ones [c]."""
    return op("reduce_mean_grad", op("expand", ones, dim=1, sizes="1", degrees="1"), dim=2, sizes=sizes, degrees="1 1")


def identity_kernel(x: Term, size: str = "c") -> ResultOf:
    """The kernel [c, c, 2a + 1, 2b + 1] that leaves an image [n, c, h, w] as it is."""
    one = op("expand", identity(channels(x), size), dim=2, sizes="1 1", degrees="1 1")
    return enlarge(one)


# --- axioms ----------------------------------------------------------------------------------------------------------


def axioms() -> tuple[Axiom, ...]:
    """All of them, in TASO's order; the lemmas it adds come last."""
    return (*_elementwise(), *_scalars(), *_convolutions(), *_concatenations(), *_matrices(), *_pools(), *_lemmas())


def _elementwise() -> Iterator[Axiom]:
    x, y, z = (tensor(n, "a..") for n in "xyz")
    yield Axiom("1", "x + (y + z) = (x + y) + z", rule("add-assoc", add(x, add(y, z)), add(add(x, y), z)))
    yield Axiom("2", "x + y = y + x", rule("add-comm", add(x, y), add(y, x)))
    yield Axiom("3", "x * (y * z) = (x * y) * z", rule("mul-assoc", mul(x, mul(y, z)), mul(mul(x, y), z)))
    yield Axiom("4", "x * y = y * x", rule("mul-comm", mul(x, y), mul(y, x)))
    yield Axiom("5", "(x + y) * z = x*z + y*z", rule("mul-add", mul(add(x, y), z), add(mul(x, z), mul(y, z))))


def _scalars() -> Iterator[Axiom]:
    """A scalar is a tensor of no dims, which `mul` broadcasts."""
    x, y, w, v = tensor("x", "a.."), tensor("y", "a.."), tensor("w"), tensor("v")
    yield Axiom("6", "s(s(x, y), w) = s(x, s(y, w))", rule("scale-scale", mul(mul(x, v), w), mul(x, mul(v, w))))
    yield Axiom("7", "s(x + y, w) = s(x, w) + s(y, w)", rule("scale-add", mul(add(x, y), w), add(mul(x, w), mul(y, w))))
    yield Axiom("8", "s(x * y, w) = x * s(y, w)", rule("scale-mul", mul(mul(x, y), w), mul(x, mul(y, w))))
    m = tensor("x", "n k")
    yield Axiom("9", "s(x^T, w) = s(x, w)^T", rule("scale-transpose", mul(turn(m), w), turn(mul(m, w))))
    p, q = tensor("x", "a.. k"), tensor("y", "k m")
    yield Axiom("10", "s(xy, w) = x s(y, w)", rule("scale-matmul", mul(matmul(p, q), w), matmul(p, mul(q, w))))
    p, q = tensor("x", "a.. n b.."), tensor("y", "a.. m b..")
    both = mul(cat("#a", p, q), w), cat("#a", mul(p, w), mul(q, w))
    yield Axiom("11", "s(cat_a(x, y), w) = cat_a(s(x, w), s(y, w))", rule("scale-concat", *both))
    image, kernel = tensor("x", "n g*c h l"), tensor("y", "g*o c i j")
    left, right = conv(mul(image, w), kernel, "g"), conv(image, mul(kernel, w), "g")
    yield Axiom("12", "conv(s(x, w), y) = conv(x, s(y, w))", rule("scale-conv-weight", left, right))
    both = relu(left), relu(right)
    yield Axiom("12 relu", "conv_relu(s(x, w), y) = conv_relu(x, s(y, w))", rule("scale-conv-relu-weight", *both))
    both = mul(conv(image, kernel, "g"), w), left
    yield Axiom("13", "s(conv(x, y), w) = conv(s(x, w), y)", rule("scale-conv", *both))


def _convolutions() -> Iterator[Axiom]:
    image, kernel = tensor("x", "n k"), tensor("y", "k m")
    both = relu(matmul(image, kernel)), op("matmul", image, kernel, act="relu")
    note = "conv2d has no activation; said of the one operator that has"
    yield Axiom("14", "relu(conv(x, y)) = conv_relu(x, y)", rule("relu-matmul", *both), note=note)
    x, y = tensor("x", "a.. n b.."), tensor("y", "a.. m b..")
    both = relu(cat("#a", x, y)), cat("#a", relu(x), relu(y))
    yield Axiom("15", "relu(cat_a(x, y)) = cat_a(relu(x), relu(y))", rule("relu-concat", *both))
    m = tensor("x", "n k")
    yield Axiom("16", "relu(x^T) = relu(x)^T", rule("relu-transpose", relu(turn(m)), turn(relu(m))))
    x, y, z = tensor("x", "n g*c h l"), tensor("y", "g*o c i j"), tensor("z", "g*o c i j")
    both = conv(x, add(y, z), "g"), add(conv(x, y, "g"), conv(x, z, "g"))
    yield Axiom("17", "conv(x, y + z) = conv(x, y) + conv(x, z)", rule("conv-add-weights", *both))
    x, y, z = tensor("x", "n g*c h l"), tensor("y", "n g*c h l"), tensor("z", "g*o c i j")
    both = conv(add(x, y), z, "g"), add(conv(x, z, "g"), conv(y, z, "g"))
    yield Axiom("18", "conv(x + y, z) = conv(x, z) + conv(y, z)", rule("conv-add-images", *both))
    x, y, z, w = tensor("x", "n b h l"), tensor("y", "o b i j"), tensor("z", "n c h l"), tensor("w", "o c i j")
    both = add(conv(x, y), conv(z, w)), conv(cat(1, x, z), cat(1, y, w))
    yield Axiom("19", "conv(x, y) + conv(z, w) = conv(cat1(x, z), cat1(y, w))", rule("conv-sum", *both))
    x, y, z, w = tensor("x", "a.. k"), tensor("y", "k m"), tensor("z", "a.. l"), tensor("w", "l m")
    both = add(matmul(x, y), matmul(z, w)), matmul(cat("#a", x, z), cat(0, y, w))
    yield Axiom("20", "xy + zw = cat1(x, z) cat0(y, w)", rule("matmul-sum", *both))


def _concatenations() -> Iterator[Axiom]:
    x, y, z, w = (tensor(n, f"a.. {size} b..") for n, size in zip("xyzw", "nnmm", strict=True))
    for number, name, by in (("21", "+", "add"), ("22", "*", "mul")):
        both = cat("#a", op(by, x, y), op(by, z, w)), op(by, cat("#a", x, z), cat("#a", y, w))
        statement = f"cat_a(x {name} y, z {name} w) = cat_a(x, z) {name} cat_a(y, w)"
        yield Axiom(number, statement, rule(f"concat-{by}", *both))
    x, y, z = tensor("x", "n g*c h l"), tensor("y", "m g*c h l"), tensor("z", "g*o c i j")
    both = cat(0, conv(x, z, "g"), conv(y, z, "g")), conv(cat(0, x, y), z, "g")
    yield Axiom("23", "cat0(conv(x, z), conv(y, z)) = conv(cat0(x, y), z)", rule("conv-samples", *both))
    both = cat(0, relu(conv(x, z, "g")), relu(conv(y, z, "g"))), relu(conv(cat(0, x, y), z, "g"))
    statement = "cat0(conv_relu(x, z), conv_relu(y, z)) = conv_relu(cat0(x, y), z)"
    yield Axiom("23 relu", statement, rule("conv-relu-samples", *both))
    x, y, z = tensor("x", "n c h l"), tensor("y", "o c i j"), tensor("z", "p c i j")
    both = cat(1, conv(x, y), conv(x, z)), conv(x, cat(0, y, z))
    yield Axiom("24", "cat1(conv(x, y), conv(x, z)) = conv(x, cat0(y, z))", rule("conv-channels", *both))
    both = cat(1, relu(conv(x, y)), relu(conv(x, z))), relu(conv(x, cat(0, y, z)))
    statement = "cat1(conv_relu(x, y), conv_relu(x, z)) = conv_relu(x, cat0(y, z))"
    yield Axiom("24 relu", statement, rule("conv-relu-channels", *both))


def _matrices() -> Iterator[Axiom]:
    x, y, z = tensor("x", "a.. k"), tensor("y", "k m"), tensor("z", "m l")
    yield Axiom("25", "x(yz) = (xy)z", rule("matmul-assoc", matmul(x, matmul(y, z)), matmul(matmul(x, y), z)))
    x, y = tensor("x", "a.. n b.."), tensor("y", "a.. m b..")
    first, second = results("split", 2, cat("#a", x, y), dim="#a", sizes="n m")
    yield Axiom("26", "split0_a(cat_a(x, y)) = x", rule("split-first", first, x))
    yield Axiom("27", "split1_a(cat_a(x, y)) = y", rule("split-second", second, y))
    x, y, z = tensor("x", "a.. k"), tensor("y", "k m"), tensor("z", "k l")
    both = matmul(x, cat(1, y, z)), cat("#a", matmul(x, y), matmul(x, z))
    yield Axiom("28", "x cat1(y, z) = cat1(xy, xz)", rule("matmul-columns", *both))
    x, y, z = tensor("x", "a.. k"), tensor("y", "k m"), tensor("z", "k m")
    yield Axiom("29", "x(y + z) = xy + xz", rule("matmul-add", matmul(x, add(y, z)), add(matmul(x, y), matmul(x, z))))
    x, y = tensor("x", "n k"), tensor("y", "k m")
    yield Axiom("30", "(x^T)^T = x", rule("transpose-transpose", turn(turn(x)), x))
    yield Axiom("31", "(xy)^T = y^T x^T", rule("transpose-matmul", turn(matmul(x, y)), matmul(turn(y), turn(x))))
    y = tensor("y", "m k")
    both = turn(cat(0, x, y)), cat(1, turn(x), turn(y))
    yield Axiom("32", "cat0(x, y)^T = cat1(x^T, y^T)", rule("transpose-concat", *both))
    x, y, z, w = tensor("x", "n k"), tensor("y", "n l"), tensor("z", "m k"), tensor("w", "m l")
    both = cat(0, cat(1, x, y), cat(1, z, w)), cat(1, cat(0, x, z), cat(0, y, w))
    yield Axiom("33", "cat0(cat1(x, y), cat1(z, w)) = cat1(cat0(x, z), cat0(y, w))", rule("concat-concat", *both))
    x, y = tensor("x", "n k"), tensor("y", "n k")
    for number, name, by in (("34", "+", "add"), ("35", "*", "mul")):
        both = turn(op(by, x, y)), op(by, turn(x), turn(y))
        yield Axiom(number, f"(x {name} y)^T = x^T {name} y^T", rule(f"transpose-{by}", *both))


def _pools() -> Iterator[Axiom]:
    x, y, z = tensor("x", "n b h l"), tensor("y", "n c h l"), tensor("z", "m b h l")
    both = cat(1, avg_pool(x), avg_pool(y)), avg_pool(cat(1, x, y))
    yield Axiom("36", "cat1(avg(x), avg(y)) = avg(cat1(x, y))", rule("avg-pool-channels", *both))
    both = cat(0, max_pool(x), max_pool(z)), max_pool(cat(0, x, z))
    yield Axiom("37", "cat0(max(x), max(y)) = max(cat0(x, y))", rule("max-pool-samples", *both))
    both = cat(1, max_pool(x), max_pool(y)), max_pool(cat(1, x, y))
    yield Axiom("38", "cat1(max(x), max(y)) = max(cat1(x, y))", rule("max-pool-channels", *both))
    x = tensor("x", "n c h l")
    kernel = pool_kernel(channels(x))
    mean = op("conv2d", x, kernel, stride="s t", padding="f-1 g-1", dilation="1 1", groups="c")
    yield Axiom("39", "conv(x, Cpool) = avg(x)", rule("pool-kernel", mean, avg_pool(x)), note="a depthwise convolution")
    same = op("conv2d", x, identity_kernel(x), stride="1 1", padding="a b", dilation="1 1")
    note = "an odd kernel, with as much padding as keeps the image's size"
    yield Axiom("40", "conv_same(x, Iconv) = x", rule("identity-kernel", same, x), note=note)
    m = tensor("x", "a.. k")
    row = tensor("y", "k")
    yield Axiom("41", "x Imm = x", rule("matmul-identity", matmul(m, identity(ones(row), "k")), m))
    m = tensor("x", "a..")
    yield Axiom("42", "x * One = x", rule("mul-one", mul(m, ones(m)), m))
    square = "2*a+1 2*b+1"
    pooled = avg_pool(identity_kernel(x), square, "1 1", "a b")
    kernel = pool_kernel(channels(x), square)
    note = "Iconv has a row and a column for each channel, Cpool one column: true of one channel alone"
    yield Axiom("43", "avg_same(Iconv) = Cpool", rule("pool-identity", pooled, kernel, "c-2"), "refuted", note)
    w = tensor("y", "g*o c i j")
    image = tensor("x", "n g*c h l")
    large = op("conv2d", image, enlarge(w), stride="s t", padding="f-1+a g-1+b", dilation="1 1", groups="g")
    small = op("conv2d", image, w, stride="s t", padding="f-1 g-1", dilation="1 1", groups="g")
    yield Axiom("44", "conv_same(x, y) = conv_same(x, enlarge(y))", rule("enlarge", small, large))


def _lemmas() -> Iterator[Axiom]:
    row = ones(tensor("y", "k"))
    yield Axiom("lemma 1", "Imm^T = Imm", rule("identity-transpose", turn(identity(row, "k")), identity(row, "k")))
    x = tensor("x", "k n")
    yield Axiom("lemma 2", "Imm x = x", rule("identity-matmul", matmul(identity(row, "k"), x), x))
    x, y = tensor("x", "n c h l"), tensor("y", "m c h l")
    both = cat(0, avg_pool(x), avg_pool(y)), avg_pool(cat(0, x, y))
    yield Axiom("lemma 3", "cat0(avg(x), avg(y)) = avg(cat0(x, y))", rule("avg-pool-samples", *both))
