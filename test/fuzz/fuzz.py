"""
Random wrong inputs for every tool, in this process.

    python test/fuzz/fuzz.py --seconds 3600 --seed 7 --save out/fuzz      # `make fuzz`

A seed makes the same inputs each time. An input that ends as none may (see `drive`) is saved, with what was seen; once
it is mended, put it into `corpus/`, where it is tried by `make test` and mutated from then on.
"""

from __future__ import annotations

import ast
import sys
from argparse import ArgumentParser
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import chdir
from functools import cache
from hashlib import sha256
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from time import monotonic

if __name__ == "__main__":
    sys.path += [str(Path(__file__).parents[1] / "helpers"), str(Path(__file__).parent)]

import seeds
from command_lines import random_argv
from drive import Fault, Result, call, check
from mutate import Mutator
from xdsl.universe import Universe

from unity_ir.tools import unity_opt, unity_rules

DEEP: tuple[tuple[str, ...], ...] = (
    ("--stats",),
    ("--stats", "--machine=2gpu"),
    ("--search", "--machine=2gpu"),
    ("--search", "--machine=box:4", "--stats"),
    ("--search=unity,budget=20", "--machine=2gpu"),
    ("--search=mcmc,budget=20", "--machine=box:2"),
    ("--search=data-parallel", "--machine=box:2", "--stats"),
    ("--search=expert", "--machine=box:4"),
    ("--search=fsdp", "--machine=box:2"),
    ("--search=tofu", "--machine=box:2"),
    ("--search=sequential", "--machine=2gpu"),
    ("--search=random", "--machine=summit:2", "-t", "triton"),
    ("--search", "--machine=2gpu", "-t", "triton"),
    ("--mixed-precision=bf16", "--search=data-parallel", "--machine=2gpu", "-t", "triton"),
    ("-t", "triton"),
    ("-t", "triton"),
    ("-t", "triton{kernels=torch matmul=torch}"),
    ("-t", "triton{optimizer=adam fuse=false convolution=triton}"),
    ("-t", "triton{convolution=triton channels=last}"),
    ("-p", "pcg-differentiate"),
    ("-p", "pcg-differentiate{optimizer=adamw lr=0.1},pcg-fuse-collectives"),
    ("-p", "pcg-differentiate,pcg-fuse-collectives,lower-pcg-to-spmd"),
    ("-p", "lower-pcg-to-spmd"),
    ("-p", "pcg-erase"),
    ("-p", "pcg-fold,canonicalize,cse"),
    ("-p", "machine-expand"),
    ("-p", "apply-rule{rule=fuse-activation}"),
    ("--trace=/dev/null",),
    ("--timeline=/dev/null",),
    ("--report=/dev/null",),
    ("--print-op-generic",),
)
"""What is done to modules that verify."""

PRINTS_MODULE = ("-p", "--search", "--search=")

TINY = """func.func @f(%x: !pcg.tensor<[4, 4], f32>) -> !pcg.tensor<[], f32> {
  %w = pcg.weight "w" : !pcg.tensor<[4, 4], f32>
  %y = pcg.matmul %x, %w : !pcg.tensor<[4, 4], f32>, !pcg.tensor<[4, 4], f32>
  %z = pcg.relu %y : !pcg.tensor<[4, 4], f32>
  %s = pcg.reduce_sum %z {dim = 0, count = 2} : !pcg.tensor<[4, 4], f32>
  func.return %s : !pcg.tensor<[], f32>
}
"""

DERIVATIONS = (
    "@f\nfuse-activation at relu#4\n",
    "@random\nfuse-activation at relu#4\nmerge-matmuls at matmul#3.2\n// all\ndivide-matmul.sum at matmul#4 with d=2\n",
    "divide-matmul.row at matmul#2 with d=2\n@f\ndivide-relu at relu#5 with d=2,e=4\n",
)


class Fuzzer:
    """Makes inputs and gives them to the tools. `counts` says how many of which kind ended how."""

    def __init__(self, seed: int, folder: Path, graphs: int = 60):
        self.random = Random(seed)
        self.folder = folder
        self.counts: Counter[str] = Counter()
        self.input: tuple[str, bytes, Sequence[str]] = ("", b"", ())
        """The last: its kind, text and arguments."""
        texts = [*seeds.modules(), *seeds.graph_texts(seed, graphs)]
        self.modules = Mutator(self.random, texts)
        self.rules = Mutator(self.random, seeds.rule_texts())
        self.machines = Mutator(self.random, seeds.machine_texts())
        self.collections = Mutator(self.random, seeds.collections())
        self.tables = Mutator(self.random, (*seeds.TABLES, *seeds.collections()[:5]))
        self.derivations = Mutator(self.random, DERIVATIONS)
        Universe.get_multiverse = cache(Universe.get_multiverse)  # pyright: ignore

    # --- one of each kind

    def text(self) -> bool:
        """A module, read, verified, printed and read again. Returns whether it verifies."""
        text = self.random.choice(self.modules.texts)
        if self.random.random() > 0.02:
            text = self.modules.mutated(text)
        return self.try_module(text.encode("utf-8", "surrogatepass"))

    def try_module(self, data: bytes) -> bool:
        result = self.opt("text", data, ())
        if result.code == 0:
            self.again(result.out)
        return result.code == 0

    def deep(self) -> None:
        """A module that verifies, searched, costed, lowered."""
        while not self.text():
            pass
        _, data, _ = self.input
        self.try_deep(data, self.random.choice(DEEP))

    def try_deep(self, data: bytes, argv: Sequence[str]) -> None:
        result = self.opt("deep", data, argv)
        if result.code == 0 and any("triton" in a for a in argv):
            ast.parse(result.out)
            self.counts["deep: programs"] += 1
        elif result.code == 0:
            self.again(result.out, "deep")

    def again(self, text: str, kind: str = "text") -> None:
        """What was printed is read as what it was printed of."""
        result = self.opt(f"{kind}, printed", text.encode(), (), count=False)
        if result.code:
            raise Fault(f"what was printed is not read: {result.err}")
        if "--print-op-generic" not in self.input[2] and kind == "text" and result.out != text:
            raise Fault(f"what was printed reads as\n{result.out}")

    def machine(self) -> None:
        path = self.write("m.toml", self.machines.mutated(self.random.choice(self.machines.texts)).encode())
        self.opt("machine", TINY.encode(), ("--stats", f"--machine={path}", *self.expanded()))

    def expanded(self) -> tuple[str, ...]:
        return self.random.choice(((), ("-p", "machine-expand"), ("--search=data-parallel",)))

    def profile(self) -> None:
        path = self.write("p.sqlite", self.damaged(seeds.profile_bytes(self.random, self.folder)))
        self.opt("profile", TINY.encode(), ("--stats", "--machine=cpu:2", f"--profile={path}"))

    def damaged(self, data: bytes) -> bytes:
        """Bytes with some others than there were, or an end missing; or as they are."""
        out = bytearray(data)
        for _ in range(self.random.choice((0, 0, 1, 3, 30))):
            out[self.random.randrange(len(out))] = self.random.randrange(256)
        if self.random.random() < 0.1:
            del out[self.random.randrange(len(out)) :]
        return bytes(out)

    def table(self) -> None:
        path = self.write("t.json", self.tables.mutated(self.random.choice(self.tables.texts)).encode())
        argv = self.random.choice(
            (("--stats", "--machine=2gpu", f"--profile={path}"), ("-t", f'triton{{tune="{path}"}}'))
        )
        self.opt("table", TINY.encode(), argv)

    def rule(self) -> None:
        text = self.rules.mutated(self.random.choice(self.rules.texts))
        path = self.write("r.pcg", text.encode())
        command = self.random.choice(("list --file", "list --file", "list --file", "show", "prove"))
        argv = ["show", "x", "--file", path] if command == "show" else [*command.split(), path]
        self.rules_tool("rule", argv)

    def applied_rule(self) -> None:
        """A rule of a file, applied to a graph."""
        rule = self.random.choice(self.rules.texts)
        name = rule.split('"')[1]
        path = self.write("r.pcg", self.rules.mutated(rule).encode())
        data = self.random.choice(self.modules.texts[-40:]).encode()
        at = self.random.choice(("", " at=relu#4", ' given="d=2"', ' given="d=2,d=3"'))
        self.opt("applied rule", data, ("-p", f'apply-rule{{rule="{name}" file="{path}"{at}}}'))

    def derivation(self) -> None:
        path = self.write("d.txt", self.derivations.mutated(self.random.choice(DERIVATIONS)).encode())
        data = self.random.choice(self.modules.texts[-40:]).encode()
        self.opt("derivation", data, ("-p", f'apply-derivation{{file="{path}"}}'))

    def collection(self) -> None:
        if self.random.random() < 0.3:
            path = self.write("c.pb", self.damaged(seeds.taso_bytes(self.random)))
        else:
            path = self.write("c.json", self.collections.mutated(self.random.choice(self.collections.texts)).encode())
        self.rules_tool("collection", ["import", path, *self.random.choice(((), ("--json",), ("--all",)))])

    def command_line(self) -> None:
        tool, argv = random_argv(self.random, self.write("m.pcg", TINY.encode()), self.folder)
        self.input = (f"command line of {tool.__name__}", TINY.encode(), argv)
        with chdir(self.folder):
            self.end("command line", call(tool, argv, TINY.encode()), True)

    KINDS: tuple[tuple[Callable[[Fuzzer], object], int], ...] = (
        *((text, 60), (deep, 4), (machine, 6), (profile, 4), (table, 4), (rule, 10), (applied_rule, 3)),
        *((derivation, 3), (collection, 4), (command_line, 8)),
    )
    """How often each is tried."""

    def one(self) -> None:
        """One input. Raises `Fault`."""
        functions, weights = zip(*self.KINDS, strict=True)
        (function,) = self.random.choices(functions, weights)
        function(self)

    # --- tools

    def write(self, name: str, data: bytes) -> str:
        path = self.folder / name
        path.write_bytes(data)
        return str(path)

    def opt(self, kind: str, data: bytes, argv: Sequence[str], count: bool = True) -> Result:
        if count:
            self.input = (kind, data, argv)
        result = call(unity_opt.main, argv, data)
        return self.end(kind, result) if count else result

    def rules_tool(self, kind: str, argv: list[str]) -> Result:
        self.input = (kind, Path(argv[-1] if argv[0] != "import" else argv[1]).read_bytes(), argv)
        return self.end(kind, call(unity_rules.main, argv), argv[0] == "prove")

    def end(self, kind: str, result: Result, silent: bool = False) -> Result:
        check(result, silent, reports=any(a in ("--stats", "--explain") for a in self.input[2]))
        by_xdsl = result.code == 1 and ("by xDSL" in result.err or "xDSL cannot" in result.err)
        self.counts[f"{kind}: {'xDSL' if by_xdsl else 'ok' if result.code == 0 else 'refused'}"] += 1
        return result


def save(folder: Path, fuzzer: Fuzzer, fault: BaseException) -> Path:
    """Write the last input, and what was seen, for people."""
    kind, data, argv = fuzzer.input
    folder.mkdir(parents=True, exist_ok=True)
    files = {f.name: f.read_bytes() for f in fuzzer.folder.glob("*.*") if any(str(f) in a for a in argv)}
    digest = sha256(data + repr(argv).encode() + b"".join(files.values())).hexdigest()[:8]
    path = folder / f"{kind.replace(' ', '_')}-{digest}"
    path.write_bytes(data)
    for name, content in files.items():
        path.with_name(f"{path.name}.{name}").write_bytes(content)
    path.with_name(path.name + ".seen").write_text(f"{kind}\n{list(argv)}\n{fault}\n", "utf-8", "backslashreplace")
    return path


def main() -> int:
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=3600.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--save", type=Path, default=Path("out/fuzz"))
    parser.add_argument("--only", help="one kind of input, such as text or deep")
    options = parser.parse_args()
    begin = told = monotonic()
    faults: Counter[str] = Counter()
    with TemporaryDirectory() as folder:
        fuzzer = Fuzzer(options.seed, Path(folder), graphs=200)
        while monotonic() < begin + options.seconds:
            try:
                getattr(fuzzer, options.only)() if options.only else fuzzer.one()
            except Exception as fault:
                last = str(fault).strip().splitlines()[-1][:160]
                faults[last] += 1
                if faults[last] <= 3:
                    print(f"{save(options.save, fuzzer, fault)}: {last}", flush=True)
            if monotonic() > told + 60:
                told = monotonic()
                said = ", ".join(f"{n} {what}" for what, n in sorted(fuzzer.counts.items()))
                print(f"{told - begin:.0f} s: {said}; {faults.total()} faults of {len(faults)} kinds", flush=True)
    print(f"{dict(sorted(fuzzer.counts.items()))}\n{faults.total()} faults")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
