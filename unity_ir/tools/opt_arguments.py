"""Define the command line of `unity-opt`."""

from __future__ import annotations

from argparse import Action, ArgumentParser, Namespace
from collections.abc import Sequence
from typing import Any, NoReturn

from xdsl.utils.arg_spec import PipelineLexer, SpecTokenKind

from unity_ir.errors import UnityError


class PrintIrdl(Action):
    """Argparse action that prints the definitions of this project's dialects in IRDL, and exits."""

    def __init__(self, **kwargs: Any):
        super().__init__(nargs=0, **kwargs)

    def __call__(
        self, parser: ArgumentParser, namespace: Namespace, values: Any, option_string: str | None = None
    ) -> None:
        from unity_ir.dialects.irdl_text import irdl_text

        print(irdl_text(), end="")
        parser.exit()


def add_arguments(parser: ArgumentParser) -> list[Action]:
    """
    Add this project's options of `unity-opt` to an argparse parser, which has those of xDSL's driver; return the new
    options' argparse actions, in the order of `--help`.
    """
    return [
        parser.add_argument(
            "--model",
            metavar="NAME[,key=value...]",
            help="read a model of the zoo instead of a file; gpt2, llama3_8b, ...; keys such as batch=4,layers=2",
        ),
        parser.add_argument(
            "--from-torch",
            metavar="PACKAGE.MODULE:FUNCTION",
            help="import a PyTorch module instead of a file; the function returns (module, example inputs) or "
            "(module, example inputs, loss)",
        ),
        parser.add_argument(
            "--from-jax",
            metavar="PACKAGE.MODULE:FUNCTION",
            help="import a loss of JAX instead of a file; the function returns (loss, (weights, batch, ..))",
        ),
        parser.add_argument(
            "--weights-out",
            metavar="FILE.safetensors",
            help="with --from-torch or --from-jax: write the weights and tables to a file; by their full names",
        ),
        parser.add_argument(
            "--freeze",
            metavar="PATTERN[,..]",
            help="before the search: do not train the weights whose names match; ! before a pattern trains what it "
            "matches: --freeze='*,!lm_head.*'",
        ),
        parser.add_argument(
            "--mixed-precision",
            metavar="TYPE",
            help="before the search: compute in bf16 (or f16); weights, their gradients and the optimizer stay in f32. "
            "Gradients are summed in f32, or as --mixed-precision=bf16,reduce=bf16 says. With products=float8, "
            "those of weights with at least 2048 rows and columns (or smallest=N) are of 8 bits, but for gradients of "
            "weights; with products=float8-all these, too",
        ),
        parser.add_argument(
            "--search",
            metavar="STRATEGY",
            help="search for the best parallel graph before the passes; --search (joint), or a baseline, as "
            "--search=data-parallel. The message for an unknown one lists all. Options of pcg-search may follow: "
            "--search=joint,optimizer=adam",
        ),
        parser.add_argument(
            "--degrees",
            metavar="KEY=VALUE[,..]",
            help="make the plan of a recipe, as --search=degrees does; --degrees=tp=8,dp=4,zero=1,sp=true. dp divides "
            "samples, tp weights, sp the sequence; ep the experts of a mixture, over neighbours of dp, with "
            "exchange=true sending tokens to their experts alone, where these have no capacity, at most imbalance=X "
            "even shares to a device; cp the sequence in attention, too, with stripes=true in an order that balances "
            "causal masks, with ring=true handing keys and values on instead of gathering them; zero=1 to 3 shards "
            "weights over dp and cp, or over shards=N of them",
        ),
        parser.add_argument(
            "--micro-batches",
            metavar="M",
            help="with --search: run the batch in M parts, one after the other, and add up gradients; also with "
            "--degrees; auto: as many as make the fastest step that fits",
        ),
        parser.add_argument(
            "--recompute",
            metavar="WHAT",
            help="with --search: what the backward computes again: none, attention, block, all, auto; also with "
            "--degrees. attention: all but matrix products and fused attention, so that nothing is saved per query and "
            "key; block: a layer from its input; all: groups of operators from a few checkpoints; auto: as little as "
            "makes the plan fit. Joint searches find it by themselves (auto)",
        ),
        parser.add_argument(
            "--offload",
            metavar="WHAT",
            help="with --search: what rests in the memory of the host: none, state, activations, all, auto; also with "
            "--degrees. state: the optimizer's, and weights of which devices hold casts, which come in windows while "
            "weights are updated; activations: what the forward saves, until the backward reads it; all: both; auto: "
            "the fastest of these where a plan does not fit without recompute, as joint searches do",
        ),
        parser.add_argument(
            "--loss-pieces",
            metavar="P",
            help="with --search: make the loss in P pieces of the tokens, one after the other; also with --degrees. "
            "The last product, the loss and their gradients are in one loop, so that the logits of one piece alone are "
            "held; auto: as few as make the plan fit, as joint searches do",
        ),
        parser.add_argument(
            "--stages",
            metavar="N",
            help="with --search: a pipeline of N stages, each on a part of the machine; with --degrees, too, whose "
            "other degrees are then of one part. A stage is a contiguous part of the model. Joint searches choose the "
            "micro-batches, and for auto N; by default they do so for large models on several nodes; 1: no pipeline",
        ),
        parser.add_argument(
            "--schedule",
            metavar="S",
            help="with --stages: the order in which stages run micro-batches; 1f1b (default), gpipe, eager-1f1b, "
            "interleaved, looped-bfs (two stages per part, interleaved:4 four), zb-h1, zb-h2 (gradients of weights "
            "late), zb-v, dualpipe-v (both, two stages per part), 2bw (asynchronous: never drains, and applies each "
            "gradient a step late)",
        ),
        parser.add_argument(
            "--explain",
            metavar="OPERATOR",
            help="with --search: print an operator's choice and what others would cost; by its name in the printed "
            "graph (matmul1) or number, with the best plan with each alternative forced, to stderr",
        ),
        parser.add_argument(
            "--budget",
            metavar="SECONDS",
            help="with --search: seconds after which the best plan so far is given; a search has a budget of work as "
            "well, whatever its time: by default --search=joint,work=100, in units of 10^9",
        ),
        parser.add_argument(
            "--machine",
            metavar="M",
            help="the machine to search for and to cost on: 2gpu, dgx-h100[:N], .., FILE.toml; N is the number of "
            "nodes of a cluster or of GPUs of a box; the message for an unknown one lists all",
        ),
        parser.add_argument(
            "--profile",
            metavar="FILE",
            help="cost on what unity-profile or unity-tune has measured; FILE.sqlite or FILE.json, rather than the "
            "profile that comes with the package",
        ),
        parser.add_argument(
            "--derivation-out",
            metavar="FILE",
            help="write the rule applications a search has found; the pass apply-derivation{file=...} does them again",
        ),
        parser.add_argument(
            "--stats", action="store_true", help="after the passes, print what each function costs to stderr"
        ),
        parser.add_argument(
            "--print-plan",
            action="store_true",
            help="after the passes, print kernels, collectives and waits of each step to stderr",
        ),
        parser.add_argument(
            "--print-ir-after",
            metavar="PASS[,PASS..]",
            help="print the module to stderr after these passes, pcg-search among them, or after all",
        ),
        parser.add_argument(
            "--trace",
            metavar="FILE.json",
            help="after the passes, simulate an iteration and write it as a trace; for Perfetto or chrome://tracing",
        ),
        parser.add_argument(
            "--timeline", metavar="FILE.svg", help="after the passes, simulate an iteration and write it as a picture"
        ),
        parser.add_argument(
            "--chakra",
            metavar="DIR",
            help="after the passes, write Chakra execution traces of a step, a file per rank; and the process groups, "
            "so that ASTRA-sim can simulate its network (docs/chakra.md)",
        ),
        parser.add_argument(
            "--report",
            metavar="FILE.html",
            help="after the passes, write a page on the plan: graph, timeline, memory, links; one file, which opens in "
            "any browser without a network (docs/report.md)",
        ),
        parser.add_argument(
            "--against",
            metavar="PLAN.pcg",
            help="with --report: say how the plan in a file differs from this one; what -o has written, for one",
        ),
        parser.add_argument(
            "--baselines",
            action="store_true",
            help="with --report: price plans that people make by hand, too; which takes a while for large models",
        ),
        parser.add_argument(
            "--irdl",
            action=PrintIrdl,
            help="print the dialects in IRDL, MLIR's language for their definition, and exit; mlir-opt --irdl-file "
            "reads it, and then verifies what -t irdl prints",
        ),
    ]


def expanded(argv: Sequence[str]) -> list[str]:
    """
    Return a command line's arguments with each `--search` that has no `=` replaced by `--search=joint`: argparse would
    take the next argument, a file, as its value.
    """
    return ["--search=joint" if word == "--search" else word for word in argv]


def check_repeated(flag: str, text: str) -> None:
    """
    Raise `UnityError` if an argument of a pass or target is given twice in `text`, the value of the option `flag`
    (`-p`, a pipeline of passes, or `-t`, a target); xDSL would take the last.

    Raises `ArgSpecParseError` for text that is no pipeline.
    """
    lexer = PipelineLexer(text)
    seen: set[str] = set()
    previous = None
    while (token := lexer.lex()).kind is not SpecTokenKind.EOF:
        if token.kind is SpecTokenKind.L_BRACE:
            seen.clear()
        if token.kind is SpecTokenKind.IDENT and previous in (SpecTokenKind.L_BRACE, SpecTokenKind.SPACE):
            key = token.span.text.replace("-", "_")
            if key in seen:
                raise UnityError(f"unity-opt: {flag} {text}: {token.span.text} is given twice; leave one out")
            seen.add(key)
        previous = token.kind


def usage_error(message: str) -> NoReturn:
    """Raise `UnityError` with this message about a wrong command line of `unity-opt`."""
    raise UnityError(f"unity-opt: {message}; see unity-opt --help")
