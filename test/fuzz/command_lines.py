"""Command lines of the tools, put together from their options and values that fit, fit another option, or nothing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from random import Random

from unity_ir.tools import unity_aot, unity_opt, unity_profile, unity_rules, unity_sweep, unity_tune

VALUES = (
    *(
        "",
        " ",
        "-",
        "0",
        "1",
        "-1",
        "2",
        "1.5",
        "nan",
        "inf",
        "1e400",
        "9" * 30,
        "x" * 500,
        "a=b",
        "a,b",
        ",",
        "=",
        "{",
    ),
    *(
        "\u202e",
        "é",
        "a\nb",
        "\udcff",
        "../..",
        "/",
        "/dev/null",
        "/nowhere/x",
        "2gpu",
        "box:2",
        "box:0",
        "box:",
    ),
    *("box:9999999999", "box:2:2", "summit", "cpu:2,profile=x", "cpu:2,profile=a,profile=b", "joint", "unity", "tofu"),
    *(
        "mcmc,budget=2",
        "joint,optimizer=adam",
        "joint,optimizer=adam,optimizer=sgd",
        "random,seed=x",
        "bf16",
        "f16",
        "f64",
    ),
    *(
        "mlp",
        "mnist_mlp",
        "gpt2,layers=0",
        "gpt2,layers=1,layers=2",
        "lenet,batch=2",
        "lenet,batch=é",
        "lenet,",
        "triton",
    ),
    *(
        "irdl",
        "irdl{a=b}",
        "triton{",
        "triton{}",
        "triton{kernels=torch}",
        "triton{kernels=torch kernels=torch}",
        "triton{lr=x}",
        "mlir",
        "wat",
    ),
    *(
        "triton{optimizer=adam beta1=2.0}",
        "pcg-erase",
        "pcg-differentiate{lr=1}",
        "pcg-differentiate{optimizer=adam lr=-1.0}",
    ),
    *(
        "pcg-erase,pcg-erase",
        "canonicalize",
        "cse",
        "pcg-differentiate{lr=0.1 lr=0.2}",
        "apply-rule",
        "apply-rule{rule=x}",
    ),
    *(
        "pcg-search",
        "pcg-search{machine=2gpu}",
        "pcg-stripe{stripes=0}",
        "pcg-stripe{stripes=2 block=0}",
        "pcg-mixed-precision{type=f8}",
        "bf16,products=float8,smallest=1",
        "bf16,products=float8-all,smallest=9999999999",
        "nothing",
        "os:getcwd",
        "json:loads",
        ":",
        "a:b",
    ),
    *(
        "relu,matmul",
        "relu",
        "matmul1",
        "matmul0",
        "common",
        "library",
        "common+~merge-matmuls",
        "csl",
        "riscv-asm",
        "wgsl",
    ),
)

OPT = (
    *(
        "--model",
        "--from-torch",
        "--from-jax",
        "--weights-out",
        "--mixed-precision",
        "--search",
        "--explain",
        "--machine",
        "--profile",
    ),
    *(
        "--derivation-out",
        "--trace",
        "--timeline",
        "--chakra",
        "--report",
        "--against",
        "-t",
        "-p",
        "-f",
        "--target",
        "--passes",
    ),
)
OPT_FLAGS = (
    *("--stats", "--baselines", "--print-op-generic", "--split-input-file", "--verify-diagnostics", "-h"),
    *(
        "--parsing-diagnostics",
        "--disable-verify",
        "--print-between-passes",
        "--allow-unregistered-dialect",
        "--version",
    ),
    *("--no-implicit-module", "--print-debuginfo", "--nothing", "--", "--search", "--time-passes"),
)
RULES = (
    "--operator",
    "--name",
    "--file",
    "--operators",
    "--parallel",
    "--size",
    "--variables",
    "--seed",
    "--jobs",
    "-o",
)
KNOBS = ("gpus", "gpus_per_node", "hbm", "memory", "bandwidth.gpus", "bandwidth.", "batch", "", "x")
COMMANDS = ("list", "show", "prove", "import", "generate", "nothing", "")

Main = Callable[[list[str]], int]


def random_argv(random: Random, module: str, folder: Path) -> tuple[Main, list[str]]:
    """A tool's `main` and arguments for it. What would take long, or measure, is always wrong in something."""
    values = (*VALUES, module, str(folder / "out"), str(folder), str(folder / "m.toml"), "triton")

    def value() -> str:
        return random.choice(values)

    def options(names: tuple[str, ...], most: int) -> list[str]:
        found: list[str] = []
        for _ in range(random.randrange(most)):
            name, given = random.choice(names), value()
            found += [f"{name}={given}"] if random.random() < 0.5 and name.startswith("--") else [name, given]
        return found

    match random.randrange(10):
        case 0 | 1:
            command = random.choice(COMMANDS)
            wrong = ["--size=1", "--variables=1", "--jobs=1"] if command == "generate" else []
            return unity_rules.main, [
                command,
                *options(RULES, 3),
                *wrong,
                *([value()] if random.random() < 0.7 else []),
            ]
        case 2:
            names = ("--machine", "--out", "--limit", "--seconds", "--each", "--device", "--seed")
            return unity_profile.main, [*options(names, 6), "nothing.pcg", value()]
        case 3:
            return unity_tune.main, [*options(("--machine", "--out", "--plan", "--types", "--seconds"), 6), value()]
        case 4:
            return unity_aot.main, [*options(("--types", "--targets", "--plans", "--machines"), 5), "nothing"]
        case 5:
            names = ("--machine", "--over", "--jobs", "--store", "--csv", "--plot", "--x", "--optimizer", "--joint")
            over = [f"--over={random.choice(KNOBS)}={value()}" for _ in range(random.randrange(3))]
            return unity_sweep.main, [*options(names, 5), *over, "nothing"]
        case _:
            argv = [*options(OPT, 5), *(random.choice(OPT_FLAGS) for _ in range(random.choice((0, 0, 0, 1, 1, 2))))]
            random.shuffle(argv) if random.random() < 0.2 else None
            return unity_opt.main, [*argv, *([module] if random.random() < 0.8 else [])]
