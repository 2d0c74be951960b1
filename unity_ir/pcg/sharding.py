"""
Sharding: which device holds which shard of a value. A value's *layout* gives each mesh axis a *role*: the number of the
dim that it shards, SUM (its devices hold addends), COPY (replicas, each used for a part of the work, so that gradients
are addends), REPEAT (replicas that all do the same work, with equal gradients), or pinned (only the devices at one
coordinate along it hold anything). An operator's *assignment* gives each mesh axis its role in the work: an index
variable that it divides, a set of operands that are in partial sums, COPY, REPEAT or pinned.

The devices form a mesh of axes (prime factors of every machine level, outermost first). Pinned axes (`pinned_at`) put a
value on a part of the machine, down to a single device, as the views of FlexFlow and Unity do. Where several axes shard
one dim, the outer axis divides first. This is PyTorch's DTensor placement per mesh axis, except that REPEAT and COPY
divide its Replicate in two: the gradient of a repeated value is repeated, that of copies is in partial sums.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import prod
from types import MappingProxyType

from unity_ir.errors import UnityError
from unity_ir.pcg.graph import Graph, rewrite
from unity_ir.pcg.node import Node, Value, grid, rebuild
from unity_ir.pcg.parallel import PARALLEL_OPERATORS, STAYING
from unity_ir.pcg.types import TensorType, tensor_type
from unity_ir.pcg.view import View
from unity_ir.tdl.divisibility import Analysis
from unity_ir.tdl.parallel import Carriers

COPY, SUM, REPEAT = -1, -2, -3
"""
Roles that are not dims. Roles are integers because layouts are keys of the search's hottest tables; that dims are 0 or
more and pinned roles below these three is known to this module and to `search.layouts` only. Elsewhere, ask
`is_shard`, `is_pinned` and `coordinate_of`.
"""

PINNED = -4
"""The role of an axis pinned at coordinate 0, and what `role_class` returns for any coordinate."""


def is_shard(role: GridRole) -> bool:
    """Return whether a mesh axis with this role shards a dim (the role is then the dim's number)."""
    return isinstance(role, int) and role >= 0


def is_pinned(role: GridRole) -> bool:
    """
    Return whether a mesh axis with this role is pinned: only the devices at one coordinate along it hold anything.
    """
    return isinstance(role, int) and role <= PINNED


def pinned_at(coordinate: int) -> int:
    """Return the role of a pinned mesh axis: only the devices at `coordinate` along it hold anything."""
    return PINNED - coordinate


def coordinate_of(role: int) -> int:
    """
    Return the coordinate of a pinned role: given pinned_at(2) returns 2. Undefined for other roles (see `is_pinned`).
    """
    return PINNED - role


def role_class(role: int) -> int:
    """
    Return a role without its coordinate, so that kinds of roles can be compared: PINNED for any pinned role, every
    other role itself.
    """
    return max(role, PINNED)


Pins = tuple[tuple[int, int], ...]
"""(mesh axis, coordinate) pairs: the devices at these coordinates; () are all devices."""


def pins_of(layout: Sequence[GridRole]) -> Pins:
    """Return (mesh axis, coordinate) for each pinned axis of a layout: given (0, pinned_at(1)) returns ((1, 1),)."""
    return _pins(tuple(layout))


@lru_cache(maxsize=65536)
def _pins(layout: tuple[GridRole, ...]) -> Pins:
    return tuple((i, PINNED - r) for i, r in enumerate(layout) if isinstance(r, int) and r <= PINNED)


def shard_count(layout: Layout, sizes: Sequence[int]) -> int:
    """
    Return the number of shards into which a layout divides a value: the product of the sizes of the mesh axes that
    shard a dim. `sizes` has the size of each mesh axis.
    """
    return prod(size for size, role in zip(sizes, layout, strict=True) if role >= 0)


Layout = tuple[int, ...]
"""A role per mesh axis."""


def copies_as_repeats(layout: Layout) -> Layout:
    """
    Return the layout with REPEAT in place of COPY. The two differ only in the gradient, so two layouts have the same
    pieces on the same devices if this makes them equal.
    """
    return tuple([REPEAT if role == COPY else role for role in layout]) if COPY in layout else layout


GridRole = str | int | Carriers
"""The role of a mesh axis in a task grid: it divides an index variable, or is COPY, REPEAT, or partial in operands."""

Assignment = tuple[GridRole, ...]
"""The role of each mesh axis in an operator's task grid."""


@dataclass(frozen=True)
class Mesh:
    """The devices as a grid with axes of these `sizes`, outermost first; devices are numbered in row-major order."""

    sizes: tuple[int, ...]

    def __hash__(self) -> int:
        return hash(self.sizes)

    @cached_property
    def devices(self) -> int:
        """The number of devices."""
        return prod(self.sizes)

    @cached_property
    def strides(self) -> tuple[int, ...]:
        """The difference in device number between neighbours along each axis."""
        return tuple(prod(self.sizes[i + 1 :]) for i in range(len(self.sizes)))

    def coordinates(self, device: int) -> tuple[int, ...]:
        """Return the coordinate of a device along each axis: given sizes (2, 3) and device 4, returns (1, 1)."""
        return tuple(device // stride % size for size, stride in zip(self.sizes, self.strides, strict=True))

    def groups(self, axes: Sequence[int]) -> list[list[int]]:
        """
        Return the groups of devices that differ only along the mesh axes with numbers `axes`, such as the groups of a
        collective; devices and groups are in ascending order.
        """
        found: dict[tuple[int, ...], list[int]] = {}
        for device in range(self.devices):
            at = self.coordinates(device)
            found.setdefault(tuple(c for i, c in enumerate(at) if i not in axes), []).append(device)
        return list(found.values())


def devices_of(graph: Graph) -> int:
    """
    Return the number of devices to assume for a graph if no machine is given: the highest device number in its machine
    views plus one, or the number of tasks of its largest task grid, whichever is more; 1 if it is not sharded.
    """
    views = [n.view.last + 1 for n in graph.nodes() if n.view is not None]
    return max((*views, *(prod(grid(n)) for n in graph.nodes())), default=1)


def mesh_of(devices: int) -> Mesh:
    """
    Return the mesh of a machine of `devices` devices without levels: its axes are the prime factors of the number.
    """
    return Mesh(prime_factors(devices))


def prime_factors(number: int) -> tuple[int, ...]:
    """Return the prime factors of a number, ascending: given 12 returns (2, 2, 3); given 1 returns ()."""
    out: list[int] = []
    factor = 2
    while number > 1:
        while number % factor == 0:
            out.append(factor)
            number //= factor
        factor += 1
    return tuple(out)


@lru_cache(maxsize=65536)
def dual(layout: Layout) -> Layout:
    """Return the layout of the gradient of a value in this layout: COPY and SUM are swapped."""
    return tuple(SUM if r == COPY else COPY if r == SUM else r for r in layout)


@lru_cache(maxsize=65536)
def layout_type(type: TensorType, layout: Layout, mesh: Mesh) -> TensorType:
    """
    Return the parallel type of a value in a layout: the shape and element types of `type`, with the degrees that the
    layout gives it on `mesh`. Memoised.
    """

    def degree(role: int) -> int:
        return prod(s for s, r in zip(mesh.sizes, layout, strict=True) if r == role)

    degrees = tuple(map(degree, range(len(type.shape))))
    return tensor_type(type.shape, type.dtype, degrees, degree(SUM), degree(COPY), grad=type.grad)


def piece_index(layout: Layout, mesh: Mesh, device: int, dim: int) -> tuple[int, int]:
    """
    Return (index, count) for one dim of a value in a layout: the index of the shard that a device holds, and the number
    of shards of the dim.
    """
    index, count = 0, 1
    for size, role, at in zip(mesh.sizes, layout, mesh.coordinates(device), strict=True):
        if role == dim:
            index, count = index * size + at, count * size
    return index, count


# --- views and layouts -----------------------------------------------------------------------------------------------


def view_of(assignment: Sequence[GridRole], order: Sequence[GridRole], mesh: Mesh) -> View:
    """
    Return the machine view of an operator, given its assignment (the role of each mesh axis): the first device, and for
    each axis of its task grid the factors and their strides. `order` has the role that each axis of the task grid
    stands for, as `grid_order` returns it.
    """
    return _view_of(tuple(assignment), tuple(order), mesh)


@lru_cache(maxsize=65536)
def _view_of(assignment: Assignment, order: Assignment, mesh: Mesh) -> View:
    def axis(what: GridRole) -> tuple[tuple[int, int], ...]:
        return merged([(s, t) for s, t, a in zip(mesh.sizes, mesh.strides, assignment, strict=True) if a == what])

    start = sum(coordinate * mesh.strides[i] for i, coordinate in pins_of(assignment))
    return View(start, tuple(a for what in order if (a := axis(what))), axis(REPEAT))


def layout_view(layout: Layout, rank: int, mesh: Mesh) -> View | None:
    """
    Return the machine view of a leaf or parallel operator whose result has this layout; None if the view would only
    name device 0. `rank` is the number of dims of the result.
    """
    view = view_of(layout, (*range(rank), COPY, SUM), mesh)
    return view if view.axes or view.repeat or pins_of(layout) else None


def merged(axis: Sequence[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """
    Return the factors (size, stride) of an axis of a machine view, with neighbours merged where one factor can stand
    for both: given `[2 @ 2, 2 @ 1]` returns `[4 @ 1]`.
    """
    out: list[tuple[int, int]] = []
    for factor, stride in axis:
        if out and out[-1][1] == factor * stride:
            out[-1] = (out[-1][0] * factor, stride)
        else:
            out.append((factor, stride))
    return tuple(out)


def axes_of(view: View, order: Sequence[GridRole], mesh: Mesh, name: str) -> Assignment:
    """
    Return the role of each mesh axis in an operator that has this machine view; the inverse of `view_of`.

    `order` has the role that each axis of the view stands for, as `grid_order` returns it. Mesh axes that the view does
    not mention are pinned at its first device. `name` is the operator's, for messages. Raises `UnityError` if the view
    names devices that the mesh does not have, or if its strides are not those of mesh axes.
    """
    if view.last >= mesh.devices:
        raise UnityError(f"pcg.{name}: its view names device {view.last}, but the machine has {mesh.devices} devices")
    assignment: dict[int, GridRole] = {}
    for what, axis in zip((*order, REPEAT), (*view.axes, view.repeat), strict=True):
        previous = -1
        for factor, stride in axis:
            if factor == 1:
                # `[1 @ 1]` is no step at all.
                continue
            run = _run(factor, stride, mesh)
            if run is None or run[0] <= previous:
                axes = ", ".join(f"{f} @ {s}" for f, s in zip(mesh.sizes, mesh.strides, strict=True))
                raise UnityError(
                    f"pcg.{name}: {factor} @ {stride} of its view does not follow the machine's axes, "
                    f"outermost first: {axes}"
                )
            if any(mesh.coordinates(view.start)[i] for i in run) or not assignment.keys().isdisjoint(run):
                raise UnityError(
                    f"pcg.{name}: {factor} @ {stride} of its view leads around the machine's axes; "
                    f"start it at a device whose coordinates there are 0, and use no axis twice"
                )
            assignment.update(dict.fromkeys(run, what))
            previous = run[-1]
    start = mesh.coordinates(view.start)
    return tuple(assignment.get(i, pinned_at(start[i])) for i in range(len(mesh.sizes)))


def _run(factor: int, stride: int, mesh: Mesh) -> range | None:
    """Return the consecutive mesh axes that make up `factor @ stride`, of a factor above 1."""
    for end, at in enumerate(mesh.strides):
        if at == stride:
            begin, size = end, mesh.sizes[end]
            while size < factor and begin > 0:
                begin -= 1
                size *= mesh.sizes[begin]
            if size == factor:
                return range(begin, end + 1)
    return None


# --- operators -------------------------------------------------------------------------------------------------------


def role_name(what: GridRole) -> str:
    """
    Return a role as text: an index variable's name, `dim 0`, `copy`, `repeat`, `sum`, `sum of x, y` (a set of operands
    in partial sums), or `at 1` (pinned).
    """
    match what:
        case str():
            return what
        case int():
            if is_pinned(what):
                return f"at {coordinate_of(what)}"
            return {COPY: "copy", SUM: "sum", REPEAT: "repeat"}.get(what, f"dim {what}")
        case _:
            return f"sum of {', '.join(sorted(what))}"


def operand_role(analysis: Analysis, operand: int, what: GridRole) -> int:
    """
    Return the role that a mesh axis has in the layout of operand number `operand`, given `what`, its role in the
    operator: the name of an index variable, a set of operands' names, COPY, REPEAT or pinned.

    An index variable becomes the dim that it shards, or COPY if the operand does not have it. A set of operands in
    partial sums becomes SUM if the operand is in the set, else COPY. COPY, REPEAT and pinned stay.
    """
    name = analysis.bound.operands[operand].name
    dims = analysis.operand_dims[name]
    match what:
        case str():
            return dims.index(what) if what in dims else COPY
        case int():
            return what
        case _:
            return SUM if name in what else COPY


def result_role(analysis: Analysis, result: int, what: GridRole) -> int:
    """
    Return the role that a mesh axis has in the layout of result number `result`, given `what`, its role in the
    operator: the name of an index variable, a set of operands' names, COPY, REPEAT or pinned.

    An index variable becomes the dim that it shards, or SUM if it is reduced. A set of operands in partial sums becomes
    SUM if the result depends on them, else COPY. COPY, REPEAT and pinned stay.
    """
    dims = analysis.result_dims[result]
    match what:
        case str():
            return dims.index(what) if what in dims else SUM
        case int():
            return what
        case _:
            return SUM if analysis.carried(result, what) else COPY


@lru_cache(maxsize=65536)
def operand_layout(analysis: Analysis, operand: int, assignment: Assignment) -> Layout:
    """Return the layout in which an operator with this assignment reads operand number `operand`. Memoised."""
    return tuple(operand_role(analysis, operand, what) for what in assignment)


@lru_cache(maxsize=65536)
def result_layout(analysis: Analysis, result: int, assignment: Assignment) -> Layout:
    """Return the layout in which an operator with this assignment makes result number `result`. Memoised."""
    return tuple(result_role(analysis, result, what) for what in assignment)


def _infer_assignment(analysis: Analysis, operands: Sequence[Layout]) -> Assignment | None:
    """
    Return the role of each mesh axis in an operator, inferred from the layouts (a role per mesh axis) in which it reads
    its operands: along each axis, an index variable, operands in partial sums, or the one role that all operands have.
    None if the layouts do not fit each other or the operator.
    """
    names = [p.name for p in analysis.bound.operands]
    dims = [analysis.operand_dims[n] for n in names]
    out: list[GridRole] = []
    for roles in zip(*operands, strict=True):
        variables: set[str | None] = {dims[i][r] for i, r in enumerate(roles) if is_shard(r)}
        if None in variables or len(variables) > 1:
            return None
        if variables:
            variable = variables.pop()
            assert variable is not None
            fits = all(is_shard(r) == (variable in dims[i]) and (r == COPY or is_shard(r)) for i, r in enumerate(roles))
            if not fits:
                return None
            out.append(variable)
        elif SUM in roles:
            carriers = frozenset(n for n, r in zip(names, roles, strict=True) if r == SUM)
            if carriers not in analysis.carriers or any(r not in (SUM, COPY) for r in roles):
                return None
            out.append(carriers)
        elif len(set(roles)) == 1:
            out.append(roles[0])
        else:
            return None
    return tuple(out)


def grid_order(node: Node) -> tuple[GridRole, ...]:
    """
    Return the role that each axis of a node's task grid stands for, in order: index variables (for a leaf or parallel
    operator, the numbers of the result's dims), then COPY, then sets of operands that can be in partial sums (SUM for a
    leaf or parallel operator).
    """
    if node.is_compute:
        return _grid_order(node.analysis)
    return (*range(len(node.types[0].shape)), COPY, SUM)


@lru_cache(maxsize=65536)
def _grid_order(analysis: Analysis) -> tuple[GridRole, ...]:
    return (*analysis.bound.extents, COPY, *analysis.carriers)


def _grid_degrees(node: Node) -> dict[GridRole, int]:
    """Return the degree of each task grid axis above 1, in `grid_order`."""
    if node.is_compute:
        c = node.configuration_in_space
        degrees: dict[GridRole, int] = {**c.degrees, COPY: c.copy, **c.sums}
    else:
        parts = node.types[0].parts_in_space
        degrees = {**dict(enumerate(parts.dims)), COPY: parts.copy, SUM: parts.sum}
    return {what: degrees[what] for what in grid_order(node) if degrees.get(what, 1) > 1}


def _assigned_degrees(assignment: Assignment, mesh: Mesh) -> dict[GridRole, int]:
    """Return the degrees an assignment gives the task grid's axes."""
    degrees: dict[GridRole, int] = {}
    for what, size in zip(assignment, mesh.sizes, strict=True):
        if what != REPEAT and not is_pinned(what):
            degrees[what] = degrees.get(what, 1) * size
    return degrees


def assignment_for(analysis: Analysis, operands: Sequence[Layout], result: Layout) -> Assignment | None:
    """
    Return an assignment (the role of each mesh axis) with which an operator reads its operands in the layouts
    `operands` and makes its first result in the layout `result`; None if there is none.

    Given `out[v, e] = sum[b](..ids[b]..g[b, e])` on one mesh axis, with ids and g sharded along b and a result in
    partial sums, returns ("b",).
    """
    return _assignment_for(analysis, tuple(operands), result)


@lru_cache(maxsize=65536)
def _assignment_for(analysis: Analysis, operands: tuple[Layout, ...], result: Layout) -> Assignment | None:
    pinned = [pinned_at(coordinate) for _, coordinate in pins_of(result)]
    may: list[GridRole] = [*analysis.splittable, COPY, REPEAT, *analysis.carriers, *pinned]
    out: list[GridRole] = []
    for axis, made in enumerate(result):
        fitting = (
            what
            for what in may
            if result_role(analysis, 0, what) == made
            and all(operand_role(analysis, i, what) == layout[axis] for i, layout in enumerate(operands))
        )
        found = next(fitting, None)
        if found is None:
            return None
        out.append(found)
    return tuple(out)


def as_layout(assignment: Assignment) -> Layout:
    """
    Return the layout of the result of a leaf or parallel operator, given its assignment: they have the same roles. Not
    for compute operators, whose index variables it would drop.
    """
    return tuple(what for what in assignment if isinstance(what, int))


def _placed_roles(node: Node, mesh: Mesh) -> Assignment:
    """
    Return the role of each mesh axis in a node, as its machine view says. Raises `UnityError` where the view does not
    fit the mesh.
    """
    assert node.view is not None
    return _axes_of(node.view, tuple(_grid_degrees(node)), mesh, node.op)


@lru_cache(maxsize=65536)
def _axes_of(view: View, order: tuple[GridRole, ...], mesh: Mesh, name: str) -> Assignment:
    return axes_of(view, order, mesh, name)


@dataclass(frozen=True)
class Placement:
    """The place of a graph on a mesh: how each compute node is divided (its assignment), and each value's layout."""

    mesh: Mesh
    assignments: Mapping[Node, Assignment]
    layouts: Mapping[Value, Layout]

    def needs(self, node: Node, operand: int) -> Layout:
        """Return the layout in which a node reads operand number `operand`; the value may be made in another layout."""
        if node.is_compute:
            return operand_layout(node.analysis, operand, self.assignments[node])
        return self.layouts[node.result]


@lru_cache(maxsize=16)
def place(graph: Graph, mesh: Mesh) -> Placement:
    """
    Return the placement of a parallel graph on a mesh: the assignment of each compute node and the layout of each
    value, as machine views say. Memoised.

    A node without a view stays where its operands are, as far as its type allows. A leaf without a view is divided
    along the outermost axes that fit its degrees, and repeated along the others. Raises `UnityError` if a degree or a
    view does not fit the mesh.
    """
    assignments: dict[Node, Assignment] = {}
    layouts: dict[Value, Layout] = {}
    for node in graph.nodes():
        operands = () if node.view is not None else tuple([layouts[v] for v in node.operands])
        facts, key = node.form.facts, (place, mesh.sizes, operands)
        found = facts.get(key)
        if found is None:
            found = facts[key] = _placed(node, operands, mesh)
        assignment, made = found
        if assignment is not None:
            assignments[node] = assignment
        for value, layout in zip(node.results, made, strict=True):
            layouts[value] = layout
    return Placement(mesh, MappingProxyType(assignments), MappingProxyType(layouts))


def _placed(node: Node, operands: tuple[Layout, ...], mesh: Mesh) -> tuple[Assignment | None, tuple[Layout, ...]]:
    """
    Return the assignment of a node, None unless it computes, and the layouts of its results. `operands` has the layouts
    of its operands, if it has no view.
    """
    if not node.is_compute:
        if node.view is not None:
            return None, (as_layout(_placed_roles(node, mesh)),)
        return None, (as_layout(_spread(node, (), mesh)) if node.is_leaf else _after(node, operands[0], mesh),)
    if node.view is not None:
        assignment = _placed_roles(node, mesh)
    else:
        inferred = _infer_assignment(node.analysis, operands)
        fits = inferred is not None and _assigned_degrees(inferred, mesh) == _grid_degrees(node)
        assignment = inferred if inferred is not None and fits else _spread(node, _hints(node, operands[0]), mesh)
    return assignment, tuple(result_layout(node.analysis, i, assignment) for i in range(len(node.types)))


def _hints(node: Node, layout: Layout) -> Assignment:
    """Return, for each mesh axis, the grid axis that the first operand, in this layout, would give it."""
    dims = node.analysis.operand_dims[node.analysis.bound.operands[0].name]
    return tuple(r if is_pinned(r) else REPEAT if not is_shard(r) or dims[r] is None else str(dims[r]) for r in layout)


def _spread(node: Node, hints: Assignment, mesh: Mesh) -> Assignment:
    """Give every grid axis mesh axes that make up its degree: hinted ones first, then outermost first."""
    degrees = _grid_degrees(node)
    out: list[GridRole] = [REPEAT] * len(mesh.sizes)
    for axis, _ in pins_of(hints):
        out[axis] = hints[axis]
    for prefer_hint in (True, False):
        for what, left in list(degrees.items()):
            for axis, size in enumerate(mesh.sizes):
                hinted = bool(hints) and hints[axis] == what
                if out[axis] == REPEAT and left % size == 0 and left > 1 and (hinted or not prefer_hint):
                    out[axis] = what
                    left //= size
            degrees[what] = left
    for left in degrees.values():
        if left > 1:
            raise UnityError(
                f"pcg.{node.op}: a degree of {left} is left over on a machine of {mesh.devices} devices; "
                "choose degrees whose product divides the number of devices"
            )
    return tuple(out)


def _after(node: Node, before: Layout, mesh: Mesh) -> Layout:
    """
    Return the layout of a parallel operator's result that moves least.

    Freed axes repeat; repeated axes take the new roles, or pinned axes if there are not enough.
    """
    if node.op in STAYING:
        return before
    rule = PARALLEL_OPERATORS[node.op]
    attributes = {k: v for k, v in node.attributes if isinstance(v, int)}
    steps = rule.chain(attributes) if rule.chain else ((node.op, tuple(attributes.items())),)
    layout = list(before)
    for op, attrs in steps:
        a = dict(attrs)
        frees = {"combine": a.get("dim", 0), "reduce": SUM, "pick": COPY}
        takes = {"partition": a.get("dim", 0), "replicate": COPY, "zero_pad": SUM}
        left = a["by"]
        old, new = (frees[op], REPEAT) if op in frees else (REPEAT, takes[op])
        # Inner axes leave a dim first and outer ones enter first, so that pieces stay contiguous.
        axes = [i for i, r in enumerate(layout) if r == old]
        if op in takes:
            axes += [i for i, r in enumerate(layout) if is_pinned(r)]
        for axis in reversed(axes) if op in frees else axes:
            if left > 1 and left % mesh.sizes[axis] == 0:
                layout[axis] = new
                left //= mesh.sizes[axis]
        if left > 1:
            raise UnityError(
                f"pcg.{node.op}: no machine axes are free to {op} by {a['by']} on {mesh.devices} devices; "
                "give the operators around it views"
            )
    return tuple(layout)


def with_views(graph: Graph, placement: Placement) -> Graph:
    """
    Return the graph with machine views on every leaf and compute node, which say where `placement` has them; parallel
    operators keep theirs. On a mesh of one device, leaves and compute nodes have no views.
    """
    new: dict[Node, Node] = {}

    def placed(node: Node, operands: tuple[Value, ...]) -> Sequence[Value]:
        view = node.view
        if node.is_compute:
            view = (
                view_of(placement.assignments[node], grid_order(node), placement.mesh) if placement.mesh.sizes else None
            )
        elif node.is_leaf:
            view = layout_view(placement.layouts[node.result], len(node.types[0].shape), placement.mesh)
        new[node] = rebuild(node, operands, view)
        return new[node].results

    return rewrite(graph, placed)
