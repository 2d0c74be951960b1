"""Write the epilogue of a matrix product's kernel: the functions of the product that it computes and stores."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from unity_ir.forms.addresses import Address, Names, address
from unity_ir.forms.contraction import Contraction, strides
from unity_ir.kernels.triton.expression import Axis, KernelWriter
from unity_ir.kernels.triton.launch import Argument, Buffer, Stage, mentions
from unity_ir.tdl.element_types import FLOAT8
from unity_ir.tdl.functions import FUNCTIONS
from unity_ir.tdl.syntax import Access, Binary, Call, Expr, Name, children

BLOCK = 16
"""Columns whose first is known to the compiler to be aligned: Triton looks for multiples of 16 in arguments."""


ADDED = "ADDED"
"""Parameter of a kernel, a constant: whether its result is added to what is stored."""


class Epilogue(KernelWriter):
    """
    Writes the epilogue of a matrix product's kernel: the statements after its loop, which compute and store functions
    of the product `of`, one for each of `stages` (results to compute). The constructor writes them all, into `lines`.

    They read and store elements at rows `m`, columns `n` and batch element `b` of the tile. Strides are parameters, so
    that one text serves all shapes (`serves_all_shapes`), unless an address has several strides along m, n or b, or
    positions are used as values.

    With `beyond`, a result whose rows are padded is stored up to the next multiple of `BLOCK` columns. If a stage has a
    `total`, the result is added to what is stored there if the kernel's parameter `ADDED` says so.
    """

    def __init__(self, of: Contraction, stages: Sequence[Stage], names: Names, beyond: bool = False):
        stage = stages[0]
        self.of = of
        self.stages = stages
        buffers: dict[str, Buffer] = {}
        places: list[Address] = []
        for each in stages:
            read = _accesses(each.expr, of.product)
            buffers |= {a.tensor: each.buffers[a.tensor] for a in read}
            places += [address(i, stage.extents) for i in (each.result.indices, *(a.indices for a in read))]
        pointers = {t: names.new(f"{t}_ptr") for t in buffers}
        outputs = {_out(k): names.new("out_ptr") for k in range(len(stages))}
        buffers |= {_out(k): each.output for k, each in enumerate(stages)}
        self.pointer_arguments = {(pointers | outputs)[t]: buffer.argument for t, buffer in buffers.items()}
        """Pointers of epilogue inputs and outputs."""
        self.integer_arguments: dict[str, Argument] = {}
        """Strides, and the global indices at which pieces start."""
        starts = {n: names.new(f"{n}_start") for n in stage.starts if any(mentions(each.expr, n) for each in stages)}
        self.integer_arguments |= {name: Argument(stage.starts[n], "i32") for n, name in starts.items()}
        super().__init__(stage.extents, pointers | outputs, frozenset(), names, starts, stage.wide)
        self.serves_all_shapes = not any(_uses_positions(each.expr) for each in stages) and all(
            not where.offset and strides(of.names, stage.extents, where, "bmn") is not None for where in places
        )
        self.roomy = frozenset(_out(k) for k, each in enumerate(stages) if beyond and _has_room(of, each))
        """Results whose rows are padded, and written `beyond` their end, where nobody reads."""
        batch = {"b": Axis("b", of.names["b"])} if of.sizes["b"] > 1 else {}
        self.tile = {
            **batch,
            "m": Axis("m[:, None]", of.names["m"], "m_inside"),
            "n": Axis("n[None, :]", of.names["n"], "n_inside"),
        }
        self.axes = list(self.tile.values())
        self.let(of.product, "product")
        self.share(each.expr for each in stages)
        for k, each in enumerate(stages):
            self.store(_out(k), address(each.result.indices, stage.extents), self.number(each.expr).text)

    def store(self, tensor: str, where: Address, value: str) -> None:
        """
        Emit the store of the expression `value` to a tensor's elements at `where`, as `KernelWriter.store` does. If the
        result is to be added to a tensor (`Stage.total`), emit code that first adds what is stored there, if the
        kernel's parameter `ADDED` is true.
        """
        if not self.stages[0].total:
            super().store(tensor, where, value)
            return
        pointer, mask = self.pointer(tensor, where)
        also = f", mask={mask}" if mask else ""
        name = self.names.new("value")
        self.emit(f"{name} = {value}")
        self.emit(f"if {ADDED}:")
        self.emit(f"    {name} += tl.load({pointer}{also})")
        self.emit(f"tl.store({pointer}, {name}{also})")

    @property
    def work(self) -> int:
        """
        An estimate of the registers that the epilogue needs beside the product. It adds up the floating point
        operations for each element of the product in all results of the kernel, one for each result but the first, 4
        if addresses are computed element by element (not `serves_all_shapes`), and 8 for each result whose rows begin
        at unaligned addresses, since every element is stored at one of its own. Beside a product of 8-bit operands, it
        adds 8 for each matrix that is read: with two of them the largest tile spills.
        """
        seen: set[Expr] = {self.of.product}

        def count(expr: Expr) -> int:
            if expr in seen:
                return 0
            seen.add(expr)
            own = FUNCTIONS[expr.function].flops if isinstance(expr, Call) else int(isinstance(expr, Binary))
            return own + sum(map(count, children(expr)))

        registers = 0 if self.serves_all_shapes else 4
        registers += 8 * sum(_is_unaligned(self.of, each) for each in self.stages)
        if self.stages[0].buffers[self.of.x].dtype == FLOAT8:
            read = {a for each in self.stages for a in _accesses(each.expr, self.of.product)}
            registers += 8 * sum(_is_matrix(self.of, self.stages[0].extents, a) for a in read)
        return sum(count(each.expr) for each in self.stages) + len(self.stages) - 1 + registers

    def pointer(self, tensor: str, where: Address) -> tuple[str, str]:
        """
        Return two expressions as text, (pointer, mask), of the elements of `tensor` that the tile covers, as
        `KernelWriter.pointer` does. The mask is true for elements that exist; it is empty if all do. `where` is the
        address of an element: an offset and, for each index variable, a stride, in elements.

        If the kernel's text serves all shapes, strides are parameters of the kernel, not numbers in its text.
        """
        if not self.serves_all_shapes:
            return super().pointer(tensor, where)
        found = strides(self.of.names, self.extents, where, "bmn")
        assert found is not None
        terms, masks = [self.pointers[tensor]], list[str]()
        for dim, axis in self.tile.items():
            if found[dim]:
                terms.append(f"{axis.index} * {self.stride(tensor, dim, found[dim])}")
                beyond = dim == "n" and tensor in self.roomy
                masks += [axis.mask] if axis.mask is not None and not beyond else []
        return " + ".join(terms), " & ".join(masks)

    def stride(self, tensor: str, dim: str, value: int) -> str:
        """
        Return the kernel parameter that holds the stride `value`, in elements, of a tensor along `dim` (`m`, `n` or
        `b`), adding the parameter if it is new.
        """
        key = ("stride", tensor, dim, value)
        name = self.known(key)
        if name is None:
            name = self.names.new(f"{self.pointers[tensor].replace('_ptr', '')}_{dim}")
            self.let(key, name)
            self.integer_arguments[name] = Argument.integer(value)
        return name


def _has_room(of: Contraction, stage: Stage) -> bool:
    """Return whether a result's rows end amid a block of `BLOCK` columns that is all in memory."""
    found = strides(of.names, stage.extents, address(stage.result.indices, stage.extents), "mn")
    columns = of.sizes["n"]
    return found is not None and found["n"] == 1 and columns % BLOCK > 0 and found["m"] >= -(-columns // BLOCK) * BLOCK


def _is_unaligned(of: Contraction, stage: Stage) -> bool:
    """Return whether a result's rows begin at addresses of which those of 16 bytes cannot be stored at once."""
    found = strides(of.names, stage.extents, address(stage.result.indices, stage.extents), "mn")
    return found is not None and found["n"] == 1 and found["m"] % (4 if stage.output.dtype == "f32" else 8) != 0


def _is_matrix(of: Contraction, extents: Mapping[str, int], access: Access) -> bool:
    """Return whether a tensor is read at another element for each row and column of the product."""
    found = strides(of.names, extents, address(access.indices, extents), "mn")
    return found is None or all(found.values())


def _out(number: int) -> str:
    """Return the writer's key for the pointer to a result; no tensor of TDL has such a name."""
    return f"result {number}"


def _accesses(expr: Expr, product: Expr) -> list[Access]:
    """Return the accesses of an expression outside of the product."""
    if expr == product:
        return []
    own = [expr] if isinstance(expr, Access) else []
    return own + [a for child in children(expr) for a in _accesses(child, product)]


def _uses_positions(expr: Expr) -> bool:
    return isinstance(expr, Name) or any(map(_uses_positions, children(expr)))
