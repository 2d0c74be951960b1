"""
A rank's program as one readable Python file.

Header and plan, the kernels, a launcher per operator and shape, the step in straight lines (each with its operator,
shape and placement as a comment), the same forward in plain PyTorch for `--check`, and the fixed part
(`lowering.runtime`). Text of the source graph never becomes code: names are printed as string literals, and
identifiers are made anew.
"""

from __future__ import annotations

import ast
import builtins
import keyword
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files

from unity_ir import __version__
from unity_ir.errors import UnityError
from unity_ir.lowering.kernels.launcher import is_convolution, launcher
from unity_ir.lowering.kernels.matmul import contraction
from unity_ir.lowering.kernels.optimizer import optimizer_launcher
from unity_ir.lowering.kernels.step import Compiled, Launcher
from unity_ir.lowering.spmd import Compute, Exchange, Leaf, Program, Register, Reshard, UpdateWeight, check_step
from unity_ir.lowering.torch_code import torch_reference
from unity_ir.lowering.windows import needs_start
from unity_ir.pcg.graph import HYPERPARAMETERS, Graph, Node, Value
from unity_ir.pcg.layout import PINNED, SUM, at, pins, role_name
from unity_ir.pcg.reshard import COLLECTIVES, PINNED_KINDS
from unity_ir.tdl.syntax import Access, Bound, Call, Expr, Name, children

TORCH_DTYPES = {
    "f32": "torch.float32",
    "f64": "torch.float64",
    "bf16": "torch.bfloat16",
    "f16": "torch.float16",
    "i64": "torch.int64",
    "i32": "torch.int32",
    "bool": "torch.bool",
}

MARK = "# --- copied into the program from here on ---\n"

IMPLEMENTATIONS = ("triton", "torch")

_IMPORT_TRITON = """
if not torch.cuda.is_available() or "gloo" in sys.argv or "--backend=gloo" in sys.argv:
    os.environ.setdefault("TRITON_INTERPRET", "1")
import triton
import triton.language as tl
"""


@dataclass(frozen=True)
class Emitted:
    """The program's text, and what its launches compile to, for ahead-of-time checks."""

    text: str
    kernels: Mapping[str, str]
    """Text of every kernel by name."""
    compiled: tuple[Compiled, ...]


def emit(
    program: Program,
    reference: Graph,
    matmul: str = "triton",
    file: str = "train.py",
    kernels: str = "triton",
    convolution: str = "torch",
) -> Emitted:
    """
    Print a training step. `reference` is its serial forward; `matmul` says what multiplies matrices, triton or torch,
    `convolution` what convolves (torch's cuDNN unless told otherwise), and `kernels` what does all the rest. A program
    with all in torch runs at full speed on CPUs, and needs no Triton.

    Raises `UnityError` for a program without a backward, and operators no kernel covers.
    """
    for name, value in (("matmul", matmul), ("kernels", kernels), ("convolution", convolution)):
        if value not in IMPLEMENTATIONS:
            raise UnityError(f"triton: {name} is {value!r}; it must be {' or '.join(IMPLEMENTATIONS)}")
    check_step(program, reference)
    if kernels == "torch":
        matmul = convolution = "torch"
    return _Printer(program, reference, matmul, file, kernels, convolution).emit()


class _Printer:
    def __init__(self, program: Program, reference: Graph, matmul: str, file: str, kernels: str, convolution: str):
        self.program = program
        self.reference = reference
        self.matmul = matmul
        self.convolution = convolution
        self.kernels = kernels
        self.file = file
        self.launchers: dict[str, Launcher] = {}
        self.names: dict[Register, str] = {}
        self.groups: dict[tuple[int, ...], None] = {}
        self.calls = {i: self._launcher(i) for i in program.body if isinstance(i, Compute)}
        self.taken = self._reserved()

    # -- names

    def _identifier(self, wish: str) -> str:
        """A fresh identifier like `wish`; every character that is not of one is dropped."""
        stem = re.sub(r"\W", "_", wish, flags=re.ASCII).strip("_") or "x"
        if not stem[0].isalpha() or keyword.iskeyword(stem):
            stem = f"x_{stem}"
        name, number = stem, 1
        while name in self.taken:
            number += 1
            name = f"{stem}_{number}"
        self.taken.add(name)
        return name

    def _reserved(self) -> set[str]:
        """Names a function of the program may read, which no local variable may hide."""
        names = {*dir(builtins), *self.launchers, "ctx", "weights", "batch", "grads"}
        for statement in ast.parse(self._header() + _runtime()).body:
            match statement:
                case ast.FunctionDef(name) | ast.ClassDef(name):
                    names.add(name)
                case ast.Import(aliases) | ast.ImportFrom(_, aliases):
                    names.update(alias.asname or alias.name.partition(".")[0] for alias in aliases)
                case _:
                    pass
        return names

    # -- the whole

    def emit(self) -> Emitted:
        step = self._step()
        update = self._update()
        reference = self._reference()
        kernels: dict[str, str] = {}
        for each in self.launchers.values():
            kernels.update(each.kernels)
        parts = [
            self._header(),
            self._plan(),
            "# --- kernels\n\n\n" + "\n\n".join(kernels.values()) if kernels else "",
            "# --- operators: one function for each shape a kernel is launched on\n\n\n"
            + "\n\n".join(each.source for each in self.launchers.values()),
            "# --- the step\n\n\n" + step,
            update,
            reference,
            _runtime(),
        ]
        text = "\n\n".join(part.rstrip("\n") + "\n" for part in parts if part)
        compile(text, self.file, "exec")
        compiled = tuple(c for each in self.launchers.values() for c in each.compiled)
        return Emitted(text, kernels, compiled)

    def _header(self) -> str:
        world = self.program.mesh.devices
        command = "python" if world == 1 else f"torchrun --nproc-per-node {world}"
        title = ascii(self.program.name)[1:-1].replace("\\", "_").replace('"', "_")
        return (
            f'"""\n{title}: one training step for {world} rank{"s" * (world > 1)}. '
            f"Written by unity-ir {__version__}.\n\n"
            f"    {command} {self.file} --check\n"
            f"    {command} {self.file} --steps 100 --save checkpoints\n\n"
            f"{self._without_gpu()}\n"
            '"""\n\n'
            "import argparse\nimport math\nimport os\nimport sys\nimport zlib\n"
            "from dataclasses import dataclass\nfrom pathlib import Path\n\n"
            "import torch\nimport torch.distributed as dist\n" + (_IMPORT_TRITON if self.kernels == "triton" else "")
        )

    def _without_gpu(self) -> str:
        if self.kernels == "torch":
            return "Without a GPU the ranks talk over gloo."
        return "Without a GPU the kernels run in Triton's interpreter and the ranks talk over gloo."

    # -- the plan

    def _plan(self) -> str:
        program = self.program
        assert program.optimizer is not None
        settings = {name: getattr(program.optimizer, name) for name in HYPERPARAMETERS[program.optimizer.name]}
        lines = [
            "# --- the plan\n",
            f"NAME = {program.name!r}",
            f"MESH = {program.mesh.sizes!r}  # sizes of the mesh axes, outermost first",
            f"WORLD = {program.mesh.devices}",
            f"GROUPS = {tuple(self.groups)!r}  # mesh axes along which ranks talk",
            f"OPTIMIZER = ({program.optimizer.name!r}, {settings!r})",
            "",
            "",
            "@dataclass(frozen=True)",
            "class Spec:",
            '    """A whole tensor and what each mesh axis does: divides a dim, or "copy", "sum", "repeat", "at i"."""',
            "",
            "    shape: tuple",
            "    dtype: torch.dtype",
            "    roles: tuple",
            "    below: int | None = None  # integers are from 0 to below this",
            "",
            "",
            "INPUTS = {",
        ]
        bounds = self._integer_bounds()
        for leaf in program.leaves("input"):
            lines.append(f"    {leaf.name!r}: {self._spec(leaf.result, bounds.get(leaf.name))},")
        lines += ["}", "WEIGHTS = {"]
        for leaf in program.leaves("weight"):
            lines.append(f"    {leaf.name!r}: {self._spec(leaf.result)},")
        lines += ["}", f"LOSS = {self._spec(program.outputs[0])}"]
        return "\n".join(lines) + "\n"

    def _spec(self, register: Register, below: int | None = None) -> str:
        tensor = self.program.tensors[register]
        roles = tuple(r if r >= 0 else role_name(r) for r in tensor.layout)
        extra = "" if below is None else f", {below}"
        return f"Spec({tensor.shape!r}, {TORCH_DTYPES[tensor.dtype]}, {roles!r}{extra})"

    def _integer_bounds(self) -> dict[str, int]:
        """For every integer input the number of classes it is compared with, from the operators that read it."""
        found: dict[str, int] = {}
        for node in self.reference.nodes():
            if node.is_compute:
                bound = node.analysis.bound
                for parameter, value in zip(bound.operands, node.operands, strict=True):
                    if parameter.integer and value.node.op == "input":
                        sizes = [s for r in bound.results for s in compared(r.expr, parameter.name, bound)]
                        if sizes:
                            found[value.node.name] = min([*sizes, found.get(value.node.name, sizes[0])])
        return found

    # -- the step

    def _step(self) -> str:
        program = self.program
        lines: list[tuple[str, str]] = []
        pending: dict[Register, str] = {}
        here: dict[tuple[tuple[int, int], ...], str] = {}
        updates = [i for i in program.body if isinstance(i, UpdateWeight)]
        weights = {leaf.result: leaf.name for leaf in program.leaves("weight")}

        def use(register: Register) -> str:
            """The name of a register, waited for if it is still under way."""
            if register in pending:
                name = pending.pop(register)
                aside = f"{name} and " if pins(program.tensors[register].layout) else ""
                lines.append((f"{name} = {aside}{name}.wait()", ""))
            return self.names[register]

        def only(text: str, pinned: tuple[tuple[int, int], ...], results: int = 1) -> str:
            """What is done on some ranks only; the others have None."""
            if not pinned:
                return text
            if pinned not in here:
                here[pinned] = self._identifier("at_" + "_".join(f"{i}_{c}" for i, c in pinned))
            nothing = f"({', '.join(['None'] * results)})" if results > 1 else "None"
            return f"{text} if {here[pinned]} else {nothing}"

        for instruction in program.body:
            match instruction:
                case Leaf(op, result, name, value):
                    own = self.names[result] = self._identifier(name or "constant")
                    text = {
                        "input": f"batch[{name!r}]",
                        "weight": f"weights[{name!r}]",
                        "constant": self._constant(result, value),
                    }[op]
                    text = only(text, pins(program.tensors[result].layout))
                    lines.append((f"{own} = {text}", self._comment(op, result)))
                case Compute(name, operands, results):
                    call = self._compute(instruction, [use(r) for r in operands])
                    for r in results:
                        self.names[r] = self._identifier(name)
                    call = only(call, pins(program.tensors[results[0]].layout), len(results))
                    targets = ", ".join(self.names[r] for r in results)
                    lines.append((f"{targets} = {call}", self._comment(name, *results)))
                case Reshard(operand, result, kind, _, source, target):
                    if kind == "retype" and target > PINNED:
                        use(operand)
                        self.names[result] = self.names[operand]
                        continue
                    text = self._reshard(use(operand), instruction)
                    text = only(text, self._there(instruction))
                    own = self.names[result] = self._identifier(kind)
                    lines.append(
                        (f"{own} = {text}", self._comment(f"{role_name(source)} to {role_name(target)}", result))
                    )
                    if kind in (*COLLECTIVES, *PINNED_KINDS):
                        pending[result] = own
                case Exchange(operand, result, kind, axes, dim, low, high):
                    self.groups.setdefault(axes)
                    text = f"{kind}(ctx, {use(operand)}, {dim}, {low}, {high}, {axes!r})"
                    text = only(text, pins(program.tensors[operand].layout))
                    own = self.names[result] = pending[result] = self._identifier(kind)
                    lines.append((f"{own} = {text}", self._comment(f"{low} before and {high} after", result)))
                case UpdateWeight():
                    pass
        loss = use(program.outputs[0])
        for update in updates:
            use(update.grad)
        out = ["def forward_backward(ctx, weights, batch):"]
        out.append('    """This rank\'s part of the loss, and of the gradient of every weight by name."""')
        lines[:0] = [(f"{name} = ctx.at({pinned!r})", "whether this rank is there") for pinned, name in here.items()]
        width = min(max((len(code) for code, _ in lines), default=0), 72)
        for code, comment in lines:
            out.append(f"    {code:<{width}}  # {comment}" if comment else f"    {code}")
        found = ", ".join(f"{weights[i.weight]!r}: {self.names[i.grad]}" for i in updates)
        out.append(f"    return {loss}, {{{found}}}")
        return "\n".join(out) + "\n"

    def _comment(self, what: str, *registers: Register) -> str:
        """Operator, whole shape, and what each mesh axis does, of the first result."""
        tensor = self.program.tensors[registers[0]]
        roles = ", ".join(map(role_name, tensor.layout)) or "one device"
        return f"{what} {list(tensor.shape)}, {roles}"

    def _constant(self, register: Register, value: float) -> str:
        tensor = self.program.tensors[register]
        axes = tuple(i for i, r in enumerate(tensor.layout) if r == SUM)
        shape = tensor.local(self.program.mesh)
        return f"constant(ctx, {value!r}, {shape!r}, {TORCH_DTYPES[tensor.dtype]}, {axes!r})"

    def _launcher(self, instruction: Compute) -> tuple[Launcher, list[str]]:
        """The function of an operator, and the positions its piece starts at where it must know them."""
        program = self.program
        local = program.local_line(instruction)
        dtypes = [program.tensors[r].dtype for r in instruction.operands]
        divided = [v for v in dict.fromkeys(instruction.assignment) if isinstance(v, str) and needs_start(local, v)]
        made = launcher(local, dtypes, self._implementation(local), divided)
        self._add(made)
        axes = [tuple(i for i, what in enumerate(instruction.assignment) if what == v) for v in divided]
        return made, [f"ctx.index({a!r}) * {local.extents[v]}" for v, a in zip(divided, axes, strict=True)]

    def _implementation(self, line: Bound) -> str:
        if all(is_convolution(r, line.extents) for r in line.results):
            return self.convolution
        product = all(contraction(r, line.extents) is not None for r in line.results)
        return self.matmul if product else self.kernels

    def _compute(self, instruction: Compute, operands: Sequence[str]) -> str:
        made, starts = self.calls[instruction]
        return f"{made.name}({', '.join([*operands, *starts])})"

    def _add(self, made: Launcher) -> None:
        old = self.launchers.setdefault(made.name, made)
        assert old.source == made.source, f"two launchers are called {made.name}"

    def _there(self, move: Reshard) -> tuple[tuple[int, int], ...]:
        """Which ranks do a move, as pins: those of the groups that hold the value, or who forgot nothing of it."""
        layout = self.program.tensors[move.result if move.kind == "retype" else move.operand].layout
        return tuple(pin for pin in pins(layout) if move.kind == "retype" or pin[0] not in move.axes)

    def _reshard(self, operand: str, move: Reshard) -> str:
        kind, axes, source, target = move.kind, move.axes, move.source, move.target
        if kind in (*COLLECTIVES, *PINNED_KINDS):
            self.groups.setdefault(axes)
        if source <= PINNED:
            held = self.program.tensors[move.operand]
            local = f"{held.local(self.program.mesh)!r}, {TORCH_DTYPES[held.dtype]}"
            match kind:
                case "broadcast":
                    return f"broadcast(ctx, {operand}, {at(source)}, {local}, {axes!r})"
                case "scatter":
                    return f"scatter(ctx, {operand}, {target}, {at(source)}, {local}, {axes!r})"
                case "send":
                    return f"send(ctx, {operand}, {at(source)}, {at(target)}, {local}, {axes!r})"
                case _:
                    return f"zero_elsewhere(ctx, {operand}, {at(source)}, {local}, {axes!r})"
        match kind:
            case "retype":
                return operand
            case "gather":
                return f"gather(ctx, {operand}, {source}, {at(target)}, {axes!r})"
            case "reduce":
                return f"reduce(ctx, {operand}, {at(target)}, {axes!r})"
            case "all_reduce":
                return f"all_reduce(ctx, {operand}, {axes!r})"
            case "all_gather":
                return f"all_gather(ctx, {operand}, {source}, {axes!r})"
            case "reduce_scatter":
                return f"reduce_scatter(ctx, {operand}, {target}, {axes!r})"
            case "all_to_all":
                return f"all_to_all(ctx, {operand}, {source}, {target}, {axes!r})"
            case "slice":
                return f"keep_part(ctx, {operand}, {target}, {axes!r})"
            case _:
                return f"zero_pad(ctx, {operand}, {source if source >= 0 else None}, {axes!r})"

    # -- the update

    def _update(self) -> str:
        program = self.program
        optimizer = program.optimizer
        assert optimizer is not None
        out = ["def update(weights, grads, moments, t):"]
        out.append(
            f'    """The optimizer\'s step number `t`, counted from 1, on this rank\'s pieces: {optimizer.name}."""'
        )
        for leaf in program.leaves("weight"):
            tensor = program.tensors[leaf.result]
            made = optimizer_launcher(
                optimizer.name, tensor.dtype, self.kernels, gradient=tensor.dtype, state=tensor.dtype
            )
            self._add(made)
            key = repr(leaf.name)
            if pins(tensor.layout):
                out.append(f"    if {key} in weights:")
            indent = "        " if pins(tensor.layout) else "    "
            if optimizer.name == "adam":
                numbers = ", ".join(map(repr, (optimizer.lr, optimizer.beta1, optimizer.beta2, optimizer.eps)))
                out.append(f"{indent}{made.name}(weights[{key}], grads[{key}], *moments[{key}], t, {numbers})")
            else:
                out.append(f"{indent}{made.name}(weights[{key}], grads[{key}], {optimizer.lr!r})")
        return "\n".join(out) + "\n"

    # -- the reference

    def _reference(self) -> str:
        """The serial forward in plain PyTorch, differentiated by autograd."""
        self.taken = self._reserved()
        names: dict[Value, str] = {}
        out = ["def reference(weights, batch):", '    """The same forward on whole tensors in plain PyTorch."""']
        for node in self.reference.nodes():
            if node.is_leaf:
                names[node.result] = own = self._identifier(_leaf_name(node))
                where = {"input": "batch", "weight": "weights"}.get(node.op)
                text = f"{where}[{node.name!r}]" if where else _whole_constant(node)
                out.append(f"    {own} = {text}")
                continue
            # What statements name is not used after them, so their names may be taken again.
            lines, texts = torch_reference(node.analysis.bound, [names[v] for v in node.operands], self.taken)
            out += [f"    {line}" for line in lines]
            if node.op == "detach":
                # An identity to its line: what stops the gradient is that it has none.
                texts = tuple(f"{text}.detach()" for text in texts)
            for value, text in zip(node.results, texts, strict=True):
                names[value] = self._identifier(node.op)
                out.append(f"    {names[value]} = {text}")
        out.append(f"    return {names[self.reference.outputs[0]]}")
        return "\n".join(out) + "\n"


def _runtime() -> str:
    """The part of `lowering.runtime` that every program holds."""
    return files("unity_ir.lowering").joinpath("runtime.py").read_text().split(MARK, 1)[1].lstrip("\n")


def _whole_constant(node: Node) -> str:
    (type,) = node.types
    dtype = "torch.float64" if type.is_floating else TORCH_DTYPES[type.dtype]
    return f"torch.full({type.shape!r}, {node.attribute('value')!r}, dtype={dtype})"


def _leaf_name(node: Node) -> str:
    return node.name if node.op in ("input", "weight") else node.op


def compared(expr: Expr, parameter: str, bound: Bound) -> Iterable[int]:
    """Extents of the index variables that an operand's elements are compared with."""
    match expr:
        case Call("eq", (Name(variable), Access(tensor))) if tensor == parameter:
            yield bound.extents[variable]
        case _:
            for child in children(expr):
                yield from compared(child, parameter, bound)
