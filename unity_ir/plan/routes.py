"""
Exchange the rows of experts: devices that divide the experts of a mixture without a capacity send each token's row to
the devices that own its experts, and get results back, instead of gathering the tokens of all (Megatron-LM's dispatcher
with all-to-all; DeepEP).

    all = all_gather(x); e_all = all_gather(e)      order = row_order(e); counts = count_rows(e)
    y = routed_matmul(all, w, e_all)                e' = send_rows(take_numbers(e, order), counts)
    out = reduce_scatter(y)                     ->  x' = send_rows(take_rows(x, order), counts)
                                                    y' = rows_matmul(x', w, e')
                                                    out = take_rows(return_rows(y', counts), row_order(order))

A value made row by row of what products make is made where these are: h of a gated MLP never goes home. It is sent home
where something else reads it, too. In the backward the gradient of a result goes the way that a token went, and back:
one `count_rows` serves the forward, the backward and what is computed again.

Sizes are data, shapes are not: a device has a buffer of `rows` received rows, of which those that are not there are
zero and have no expert (number -1), which products skip. `rows` is the most that may come, or so many times an even
share as the user says; a step in which more come ends on all ranks of the group, with one line (`count_rows`).

The lines are those of a program as any other: they are scheduled, priced, simulated and printed as such. Types count a
buffer as repeated along the axes that divide experts, though each device there has rows of its own; no line compares
them, and the weights' gradients, which sum over rows, are divided along these axes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from math import ceil, inf, prod

from unity_ir.ops import operator
from unity_ir.ops.operator import Attributes
from unity_ir.ops.routed import ROUTED_MATMUL, ROUTED_MATMUL_NT, ROUTED_MATMUL_TN
from unity_ir.ops.routes import ROWS_MATMUL, ROWS_MATMUL_NT, ROWS_MATMUL_TN
from unity_ir.pcg.sharding import (
    COPY,
    REPEAT,
    Assignment,
    Layout,
    assignment_for,
    copies_as_repeats,
    is_pinned,
    result_layout,
)
from unity_ir.plan.instructions import (
    Compute,
    Instruction,
    Leaf,
    Register,
    ReshardMove,
    RowMove,
    Tensor,
    makers_of,
    makes,
    reads,
)
from unity_ir.plan.program import Program, global_line
from unity_ir.plan.saved_softmax import first_with_values
from unity_ir.tdl.syntax import Access, AttrValue, Binary, Bound, Call, Const, Expr, Var, children

OF_ROWS = {
    ROUTED_MATMUL.name: ROWS_MATMUL.name,
    ROUTED_MATMUL_NT.name: ROWS_MATMUL_NT.name,
    ROUTED_MATMUL_TN.name: ROWS_MATMUL_TN.name,
}
"""For each product of rows with the weights that integers pick: the product of rows that have arrived."""


@dataclass(frozen=True)
class Route:
    """
    The way of some rows: the mesh axes that divide the experts, the register of the rows' experts on the devices that
    have the tokens, and how many experts there are.
    """

    axes: tuple[int, ...]
    chosen: Register
    experts: int


@dataclass(frozen=True)
class Exchanges:
    """The products of a program whose rows can be exchanged, and where the registers around them can be made."""

    products: Mapping[tuple[Register, ...], Route]
    """The route of each product of rows, by its results."""
    home: Mapping[Register, Register]
    """What a register that is gathered for products is gathered from."""
    there: Mapping[Register, Route]
    """The registers that can be made where experts are: what products make of rows, and what is made of these alone."""
    addends: Mapping[Register, Register]
    """The addends, as products make them, that each register of `there` is reduced from, if it is."""
    passed: frozenset[Register]
    """Results of collectives that are one of several in a row between addends and what they are reduced to."""


def exchanges(program: Program) -> Exchanges:
    """
    Return what of a program can be exchanged. The experts of a product must be divided over mesh axes along which its
    rows and their experts are gathered, and what it makes of rows is reduced to where the rows were, by collectives
    over these axes alone whose results nothing else reads.
    """
    left_out: set[tuple[Register, ...]] = set()
    while True:
        finder = _Finder(program, left_out)
        found = finder.found()
        # Rows that are where the experts of one route are cannot be read by way of another.
        wrong = {
            results
            for results, route in found.products.items()
            if isinstance(product := finder.makers[results[0]], Compute)
            and any(found.there.get(found.home[r], route) != route for r in _rows_of(product))
        }
        if not wrong:
            return found
        left_out |= wrong


class _Finder:
    def __init__(self, program: Program, left_out: set[tuple[Register, ...]]):
        """Leave out the products that make the registers `left_out`."""
        self.program = program
        self.left_out = left_out
        self.firsts = first_with_values(program)
        self.makers = makers_of(program.body)
        self.readers: dict[Register, list[Instruction]] = defaultdict(list)
        for i in program.body:
            for register in reads(i):
                self.readers[register].append(i)
        self.home: dict[Register, Register] = {}

    def found(self) -> Exchanges:
        products: dict[tuple[Register, ...], Route] = {}
        for i in self.program.body:
            if not isinstance(i, Compute) or i.operator not in OF_ROWS or i.results in self.left_out:
                continue
            if (route := self._route(i)) is not None:
                products[i.results] = route
        partial = self._partial(products)
        there, addends, passed = dict(partial), dict[Register, Register](), set[Register]()
        for register, route in partial.items():
            if moves := self._scatters(register, route):
                *between, last = (move.result for move in moves)
                addends[last], there[last] = register, route
                passed.update(between)
        for i in self.program.body:
            if isinstance(i, Compute) and i.results[0] not in there and (route := self._made_there(i, there)):
                there[i.results[0]] = route
        kept = {
            results: route
            for results, route in products.items()
            if results[0] in partial or self._operator(results[0]) == ROUTED_MATMUL_TN.name
        }
        return Exchanges(kept, self.home, there, addends, frozenset(passed))

    def _operator(self, register: Register) -> str:
        made = self.makers[register]
        return made.operator if isinstance(made, Compute) else ""

    def _route(self, product: Compute) -> Route | None:
        """Return the route of a product's rows; None if they cannot be exchanged."""
        program = self.program
        axes = tuple(axis for axis in range(program.axes) if product.assignment[axis] == "v")
        *rows, chosen = product.operands if product.operator == ROUTED_MATMUL_TN.name else product.operands[::2]
        homes = [self._gathered(r, axes) for r in (*rows, chosen)]
        if not axes or any(home is None for home in homes) or not self._divides_rows_alone(product):
            return None
        found = [home for home in homes if home is not None]
        first, dims = found[-1], len(program.tensors[chosen].shape)
        divided = [[axis for axis, role in enumerate(program.tensors[r].layout) if role == 0] for r in found]
        inner = {role for r in found for role in program.tensors[r].layout if 0 < role < dims}
        if inner or divided != [divided[-1]] * len(found):
            return None
        self.home.update(zip((*rows, chosen), found, strict=True))
        weights = product.operands[1] if product.operator != ROUTED_MATMUL_TN.name else product.results[0]
        return Route(axes, self.firsts.get(first, first), program.tensors[weights].shape[0])

    def _divides_rows_alone(self, product: Compute) -> bool:
        """Return whether axes that do not divide a product's experts divide nothing but its rows, along dim 0."""
        analysis = self.program.analysis(product)
        first = analysis.operand_dims[analysis.bound.operands[-1].name][0]
        return all(what in ("v", first, COPY, REPEAT) or is_pinned(what) for what in product.assignment)

    def _gathered(self, register: Register, axes: tuple[int, ...]) -> Register | None:
        """Return what a register is gathered from along dim 0, over these mesh axes alone; None if it is not so."""
        left = {*axes}
        while left:
            move = self.makers.get(register)
            if not isinstance(move, ReshardMove) or move.kind != "all_gather" or move.source != 0:
                return None
            if not left.issuperset(move.axes):
                return None
            left -= {*move.axes}
            register = move.operand
        return register

    def _scatters(self, register: Register, route: Route) -> tuple[ReshardMove, ...]:
        """Return the collectives, in order, that reduce addends along the route's axes alone to shards of dim 0."""
        found: list[ReshardMove] = []
        left = {*route.axes}
        while left:
            match self.readers[register]:
                case [ReshardMove(kind="reduce_scatter", target=0) as move] if left.issuperset(move.axes):
                    left -= {*move.axes}
                    found.append(move)
                    register = move.result
                case _:
                    return ()
        return tuple(found)

    def _partial(self, products: Mapping[tuple[Register, ...], Route]) -> dict[Register, Route]:
        """
        Return the addends of rows that products make, or that are made of such alone, element by element, and that are
        read for nothing but the same and to be reduced; with the route of each.
        """
        of_rows = ((made[0], r) for made, r in products.items() if self._operator(made[0]) != ROUTED_MATMUL_TN.name)
        partial = dict(of_rows)
        for i in self.program.body:
            if isinstance(i, Compute) and i.results[0] not in partial and (route := self._made_there(i, partial)):
                partial[i.results[0]] = route
        while True:
            wrong = [r for r, route in partial.items() if not self._is_reduced(r, route, partial)]
            if not wrong:
                return partial
            for register in wrong:
                del partial[register]

    def _is_reduced(self, register: Register, route: Route, partial: Mapping[Register, Route]) -> bool:
        """Return whether addends are read to be reduced, or for other addends of the route alone."""
        made = self.makers[register]
        if isinstance(made, Compute) and made.operator not in OF_ROWS and self._made_there(made, partial) is None:
            return False
        if self._scatters(register, route):
            return True
        return bool(self.readers[register]) and all(
            isinstance(i, Compute) and partial.get(i.results[0]) == route and i.operator not in OF_ROWS
            for i in self.readers[register]
        )

    def _made_there(self, compute: Compute, there: Mapping[Register, Route]) -> Route | None:
        """Return the route of an operator that makes elements of rows of one route alone; None for others."""
        route = there.get(compute.operands[0]) if compute.operands else None
        if route is None or len(compute.results) != 1 or compute.operator in OF_ROWS:
            return None
        if any(there.get(r) != route for r in compute.operands[1:]):
            return None
        layouts = {copies_as_repeats(self.program.tensors[r].layout) for r in (*compute.operands, *compute.results)}
        shapes = {self.program.tensors[r].shape for r in (*compute.operands, *compute.results)}
        is_alike = len(layouts) == len(shapes) == 1 and is_elementwise(self.program.analysis(compute).bound)
        return route if is_alike else None


def is_elementwise(line: Bound) -> bool:
    """Return whether each element of a line's one result is made of the elements at its place alone, wherever it is."""
    (result,) = line.results

    def is_made_alone(expr: Expr) -> bool:
        if isinstance(expr, Access):
            return expr.indices == result.indices
        return isinstance(expr, Const | Binary | Call) and all(map(is_made_alone, children(expr)))

    return all(type(index) is Var for index in result.indices) and is_made_alone(result.expr)


def with_routes(program: Program) -> Program:
    """
    Return the program with the rows of experts exchanged wherever they can be (`exchanges`); itself, if nowhere.
    `Program.exchange_rows` says how many times an even share of rows a device may receive.
    """
    found = exchanges(program)
    return _Writer(program, found).program() if found.products else program


@dataclass(frozen=True)
class _Way:
    """The registers by which rows go to the devices that own their experts, and back."""

    order: Register
    places: Register
    counts: Register
    experts: Register
    """The experts of received rows."""
    count: RowMove
    """The move that counts rows, whose sizes are those of the others."""
    rows: int
    """Rows of a piece at home."""


@dataclass
class _Writer:
    """Writes a program whose experts' rows are exchanged."""

    of: Program
    found: Exchanges
    body: list[Instruction] = field(default_factory=list[Instruction])
    there: dict[tuple[Register, Route], Register] = field(default_factory=dict[tuple[Register, Route], Register])
    """By a register, or the addends that it is reduced from, and a route: the same where the experts are."""
    ways: dict[Route, _Way] = field(default_factory=dict[Route, _Way])

    def __post_init__(self) -> None:
        self.tensors: dict[Register, Tensor] = dict(self.of.tensors)
        self.makers = makers_of(self.of.body)
        self.at_home: set[Register] = {*self.of.outputs}
        """The registers that are read where the tokens are."""
        self.at_experts: dict[Register, dict[Route, None]] = {}
        """Those that are read where the experts of routes are, with these."""
        for i in reversed(self.of.body):
            self._want(i)
        self.sent: dict[Register, list[Route]] = defaultdict(list)
        """The routes by which a register is sent."""
        for register, routes in self.at_experts.items():
            if register not in self.found.there:
                self.sent[register] += routes
        self.waiting: dict[Route, list[Register]] = defaultdict(list)
        """Registers to be sent, by routes that are not made yet."""

    def program(self) -> Program:
        """Return the program."""
        routes: dict[Register, list[Route]] = defaultdict(list)
        for route in dict.fromkeys(self.found.products.values()):
            routes[route.chosen].append(route)
        for i in self.of.body:
            self._write(i)
            for register in makes(i):
                for route in routes[register]:
                    self.ways[route] = self._way(route)
                    for waiting in self.waiting[route]:
                        self._send(waiting, route)
                for route in self.sent[register]:
                    if route in self.ways:
                        self._send(register, route)
                    else:
                        self.waiting[route].append(register)
        return replace(self.of, body=tuple(self.body), tensors=self.tensors)

    # -- what is read where

    def _want(self, i: Instruction) -> None:
        """Note where an instruction reads its operands, from where its results are read."""
        made = makes(i)
        if isinstance(i, Compute) and (route := self.found.products.get(i.results)) is not None:
            if self._is_read(i, route):
                rows = _rows_of(i)
                self.at_home.update(r for r in (*i.operands, route.chosen) if r not in (*rows, i.operands[-1]))
                self._want_there([self.found.home[r] for r in rows], route)
        elif not made or not isinstance(i, Compute | ReshardMove):
            self.at_home.update(reads(i))
        elif made[0] in self.found.addends:
            if made[0] in self.at_home:
                self._want_there(made, self.found.there[made[0]])
        elif made[0] not in self.found.passed:
            route = self.found.there.get(made[0])
            if route is None and made[0] in self.at_experts:
                self.at_home.add(self._tokens(made[0]) or made[0])
            if route is not None and self._is_wanted_there(made[0], route):
                self._want_there(reads(i), route)
            if not self.at_home.isdisjoint(made):
                self.at_home.update(reads(i))

    def _want_there(self, registers: Iterable[Register], route: Route) -> None:
        """Note that registers, or the addends that they are reduced from, are read where the experts of a route are."""
        for register in registers:
            self.at_experts.setdefault(self._key(register), {})[route] = None

    def _is_wanted_there(self, register: Register, route: Route) -> bool:
        return route in self.at_experts.get(register, ())

    def _is_read(self, product: Compute, route: Route) -> bool:
        """Return whether something reads what a product makes."""
        result = product.results[0]
        return self._is_wanted_there(result, route) if result in self.found.there else result in self.at_home

    def _key(self, register: Register) -> Register:
        return self.found.addends.get(register, register)

    def _tokens(self, register: Register) -> Register | None:
        """Return the tokens [t, h] of which a register has each several times, one after the other, if it has."""
        match self.makers.get(register):
            case Compute("expand", (tokens,), _, attributes) if dict(attributes)["dim"] == 1:
                shapes = (self.tensors[r].shape for r in (tokens, register))
                return tokens if tuple(map(len, shapes)) == (2, 3) else None
            case _:
                return None

    # -- instructions

    def _write(self, i: Instruction) -> None:
        made = makes(i)
        if isinstance(i, Compute) and (route := self.found.products.get(i.results)) is not None:
            if self._is_read(i, route):
                self._product(i, route)
        elif not made or not isinstance(i, Compute | ReshardMove):
            self.body.append(i)
        elif made[0] in self.found.addends:
            if made[0] in self.at_home:
                self._send_home(made[0], self.found.there[made[0]])
        else:
            if not self.at_home.isdisjoint(made):
                self.body.append(i)
            route = self.found.there.get(made[0])
            if isinstance(i, Compute) and route is not None and self._is_wanted_there(made[0], route):
                operands = tuple(self.there[self._key(r), route] for r in i.operands)
                self.there[made[0], route] = self._each(i.operator, operands, dict(i.attributes))

    def _way(self, route: Route) -> _Way:
        """Append the lines that sort the rows of a route, count them, and send their experts; return its registers."""
        e = self._in_pieces(route.chosen, self._dims(route))
        order, tensor, count = self._each("row_order", (e,)), self.tensors[e], self._count(route, e)
        ways = prod(self.of.mesh.sizes[axis] for axis in route.axes)
        counts = self._register(Tensor((tensor.shape[0], 2, ways), "i64", copies_as_repeats(tensor.layout)))
        count = replace(count, result=counts)
        self.body.append(count)
        way = _Way(order, self._each("row_order", (order,)), counts, e, count, tensor.shape[1])
        return replace(way, experts=self._move(way, self._each("take_numbers", (e, order)), "send_rows"))

    def _count(self, route: Route, e: Register) -> RowMove:
        """Return the move that counts a route's rows, but for its result; `e` has their experts in pieces."""
        rows = self.tensors[e].shape[1]
        ways = prod(self.of.mesh.sizes[axis] for axis in route.axes)
        experts = route.experts // ways
        shape = self.of.tensors[route.chosen].shape
        # A token goes to different experts, as long as they are the largest of something.
        chosen = shape[-1] if len(shape) == 2 and self._are_largest(route.chosen) else 1
        most = rows * ways * min(chosen, experts) // chosen
        factor = self.of.exchange_rows
        bound = most if factor == inf else min(most, ceil(rows * factor))
        live = min(bound, ceil(rows * (1 if factor == inf else factor)))
        return RowMove(e, e, "count_rows", route.axes, 0, 0, None, None, bound, live, experts, self._layer(route))

    def _are_largest(self, register: Register) -> bool:
        """Return whether a register has places of different elements, the largest of a row."""
        while isinstance(made := self.makers.get(register), ReshardMove):
            register = made.operand
        return isinstance(made, Compute) and made.operator == "topk"

    def _layer(self, route: Route) -> str:
        """Return the name of the experts of a route: that of the first weights, without their own part of it."""
        for results, other in self.found.products.items():
            product = self.makers[results[0]]
            if other == route and isinstance(product, Compute) and product.operator != ROUTED_MATMUL_TN.name:
                name = self._weight(product.operands[1])
                return name.removesuffix(".weight").rpartition(".")[0] or name
        return ""

    def _weight(self, register: Register) -> str:
        while (made := self.makers.get(register)) is not None and not isinstance(made, Leaf):
            register = reads(made)[0]
        return made.name if isinstance(made, Leaf) else ""

    def _send(self, register: Register, route: Route) -> None:
        """Append the lines that send a register's rows to the devices that own their experts."""
        way, tokens = self.ways[route], self._tokens(register)
        at = way.order
        if tokens is not None:
            chosen = self.tensors[register].shape[1]
            at = self._each("row_tokens", (at,), {"chosen": chosen}) if chosen > 1 else at
        x = self._in_pieces(register if tokens is None else tokens, self._dims(route) if tokens is None else 1)
        packed = self._each("take_rows", (x, at))
        self.there[register, route] = self._move(way, packed, "send_rows")

    def _dims(self, route: Route) -> int:
        """Return how many dims the rows of a route have, before that of their elements."""
        return len(self.of.tensors[route.chosen].shape)

    def _product(self, product: Compute, route: Route) -> None:
        way, rows = self.ways[route], _rows_of(product)
        given = {r: self.there[self._key(self.found.home[r]), route] for r in rows}
        operands = (*(given.get(r, r) for r in product.operands[:-1]), way.experts)
        live = way.count.live / way.count.rows
        name = OF_ROWS[product.operator]
        attributes = operator(name).attributes({**dict(product.attributes), "live": live})
        tensors = [self.tensors[r] for r in operands]
        results = product.results
        if product.results[0] in self.found.there:
            analysis = global_line(name, tensors, attributes)
            # Each row has one addend, that of the device where it is.
            layout = result_layout(analysis, 0, product.assignment)
            layout = tuple(REPEAT if axis in route.axes else role for axis, role in enumerate(layout))
            shape, dtype = analysis.bound.result_shapes[0], self.tensors[product.results[0]].dtype
            results = (self._register(Tensor(shape, dtype, copies_as_repeats(layout))),)
            self.there[product.results[0], route] = results[0]
        self.body.append(Compute(name, operands, results, attributes, product.assignment))

    def _send_home(self, register: Register, route: Route) -> None:
        """Append the lines by which rows come home as `register`, in the order in which they left."""
        way, tensor = self.ways[route], self.of.tensors[register]
        packed = self._move(way, self.there[self._key(register), route], "return_rows")
        rows = self._each("take_rows", (packed, way.places))
        self.body.append(self._reshaped(rows, tensor.shape, copies_as_repeats(tensor.layout), register))

    def _move(self, way: _Way, register: Register, kind: str) -> Register:
        """Append a move of rows on their way there (`send_rows`) or back (`return_rows`); return its result."""
        tensor, axes = self.tensors[register], way.count.axes
        group = prod(self.of.mesh.sizes[axis] for axis in axes)
        if kind == "send_rows":
            source, target, pieces, rows = 0, REPEAT, tensor.shape[0] // group, way.count.rows
        else:
            source, target, pieces, rows = REPEAT, 0, tensor.shape[0] * group, way.rows
        layout = tuple(target if axis in axes else role for axis, role in enumerate(tensor.layout))
        result = self._register(replace(tensor, shape=(pieces, rows, *tensor.shape[2:]), layout=layout))
        move = replace(way.count, operand=register, result=result, kind=kind, source=source, target=target)
        self.body.append(replace(move, counts=way.counts))
        return result

    def _in_pieces(self, register: Register, dims: int) -> Register:
        """Return a register's rows, of its first `dims` dims, by piece: one of each device and micro-batch."""
        tensor = self.tensors[register]
        layout = copies_as_repeats(tensor.layout)
        pieces = prod(size for size, role in zip(self.of.mesh.sizes, layout, strict=True) if role == 0)
        shape = (pieces, prod(tensor.shape[:dims]) // pieces, *tensor.shape[dims:])
        layout = tuple(role - dims + 2 if role >= dims else role for role in layout)
        made = self._register(Tensor(shape, tensor.dtype, layout))
        self.body.append(self._reshaped(register, shape, layout, made))
        return made

    def _reshaped(self, register: Register, shape: tuple[int, ...], layout: Layout, result: Register) -> Compute:
        attributes = operator("reshape").attributes({"shape": shape})
        assignment = self._assignment("reshape", (register,), attributes, layout)
        return Compute("reshape", (register,), (result,), attributes, assignment)

    def _each(
        self, name: str, operands: tuple[Register, ...], given: Mapping[str, AttrValue] | None = None
    ) -> Register:
        """Append an operator that makes a result in the layout of its first operand; return that."""
        tensors = [self.tensors[r] for r in operands]
        attributes = operator(name).attributes(given or {})
        layout = copies_as_repeats(tensors[0].layout)
        bound = global_line(name, tensors, attributes).bound
        (result,) = bound.results
        made = self._register(Tensor(bound.result_shape(result), result.dtype or tensors[0].dtype, layout))
        assignment = self._assignment(name, operands, attributes, layout)
        self.body.append(Compute(name, operands, (made,), attributes, assignment))
        return made

    def _assignment(
        self, name: str, operands: tuple[Register, ...], attributes: Attributes, layout: Layout
    ) -> Assignment:
        tensors = [self.tensors[r] for r in operands]
        analysis = global_line(name, tensors, attributes)
        found = assignment_for(analysis, [copies_as_repeats(t.layout) for t in tensors], layout)
        assert found is not None, f"{name} of {[str(t) for t in tensors]} to {layout}"
        return found

    def _register(self, tensor: Tensor) -> Register:
        register = len(self.tensors)
        self.tensors[register] = tensor
        return register


def _rows_of(product: Compute) -> tuple[Register, ...]:
    """Return the operands of a product that are rows: of the weights' gradient two."""
    return product.operands[:2] if product.operator == ROUTED_MATMUL_TN.name else product.operands[:1]
