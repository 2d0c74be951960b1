"""
Write docs/accuracy.md, docs/accuracy.svg and unity_ir/cost/accuracy.toml anew from bench/results/published.json:
`python docs/update_accuracy.py`. A test keeps them true.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from math import log10
from pathlib import Path
from statistics import median

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "bench"))

from published import key_of, known  # noqa: E402
from published_figures import Figures, Predicted, by, figures, spearman, weighed  # noqa: E402
from published_rows import Published, published  # noqa: E402

PATH = ROOT / "docs" / "accuracy.md"
PICTURE = ROOT / "docs" / "accuracy.svg"
BANDS = ROOT / "unity_ir" / "cost" / "accuracy.toml"
RESULTS = ROOT / "bench" / "results" / "published.json"

SCALED = """\
The last column is the median error if predictions were scaled by one constant for each kind of GPU, the median ratio
of the other sources on it: each source is left out in turn.
"""
LARGE = 1e9
"""Parameters of a large language model."""
LEAST = 5
"""Rows of a device and family of which a band is given."""

HEAD = """\
# Predicted against measured

Made by `docs/update_accuracy.py` of `bench/results/published.json`. `python bench/published.py --json
bench/results/published.json --jobs 2` makes that: it predicts every step again that the file lacks, on a laptop,
without a GPU. A row is a model of the zoo, a machine, a `--degrees` line and the kernels that ran
([data](../bench/published), each file with its source); it is planned and simulated as emitted. **No constant is
fitted to a row or a source**, so that every source is held out. An error is |predicted / measured - 1|; a ratio is
predicted / measured.

What a row says of the code that was measured: which operators were fused, which kernel attention was (FlashAttention
1 or 2, cuDNN's, or batched products with a softmax between them), whether its weights were dropped by a kernel of its
own, whether the loss was, and each step of a norm; which moves ran beside kernels: those that the plan starts early,
none, or also those of tensor parallelism, in pieces beside their products; and whether each kernel waited for its
launch. How fast those kernels of attention are is from their papers (`bench/published/kernels/attention.toml`).

Matrix products and convolutions are priced as those of cuBLAS and cuDNN, by tiles and waves of tiles, convolutions of
3 x 3 and 5 x 5 by transformed tiles (Winograd) where that is faster (`bench/published_kernels.py`). Their figures are
of kernels that were measured one by one, each with its source (`bench/published/kernels/library.toml`): 74 products on
an H100 are met with a median error of 6% (by roofline 17%), 34 convolutions on a P100 with 9% and on a V100 with 17%.
Where no kernel was measured (convolutions in 16 bits, TF32), and for memory and collectives, it is 0.7 of the device's
peaks, as for our own programs, which are priced by the presets alone ([machines.md](machines.md)).
"""

WHY = """\
## Where it errs

- **Products on A100** reach 0.83 of the peak alone (8192 x 8192 x 8192 of cuBLAS, numbers normally distributed, at the
  board's limit of power). With it, MPT's steps are met, and those of Megatron-LM, vTrain and torchtitan, whose layers
  launch more kernels than are priced here (dropout of hidden values, copies of strides, casts), are predicted some 8%
  too fast.
- **Products on H100** reach 0.85 in short runs; 0.7 is the presets' assumption, since no measurement under the board's
  limit of power was found. Boards of 500 W are priced at 0.8 of those of 700 W (`grand-teton`), by a power law through
  boards of 350 and 700 W.
- **Tensor parallelism of NeMo** runs in pieces beside products (userbuffers). What stays exposed is taken as one piece
  of so many; Nemotron-4 15B is predicted some 10% too slow (20% if nothing were hidden).
- **BigScience** is predicted 10 to 38% too fast (43 rows, half of them by 16%), small micro-batches more. With
  `CUDA_LAUNCH_BLOCKING=1` a layer took 14 to 23 ms per micro-batch beyond what grows with its samples; here it is 4 ms,
  the host time of vTrain's profiles.
- **MPT 13B on H100** in micro-batches of two, and 30B and 70B on few GPUs, are measured slower than neighbours, beyond
  their moves; so are single rows of other sizes. What the allocator does when memory is short is not modelled.
- **vTrain**: three steps (9,839, 8,881 and 6,228 ms) stand out beside their neighbours, and nothing predicts them. Its
  nodes are joined by 800 Gb/s, half of a DGX A100's, as its configurations say: all-reduces of tensor parallelism over
  two nodes take most of those steps.
- **nanoGPT of December 2022** took twice what its kernels allow: 50,257 columns, which are not aligned, an optimizer
  of a kernel per weight, and casts of weights at each use.
- **Convolutions on K80** are priced with the parts of the peak of the P100, at base clocks; neither is known.
  Inception's, the most and the smallest, are 33% off. Those in 16 bits and in TF32 are priced at 0.7 of the peak
  whatever their shape.

**Not modelled:** host time of eager programs that run ahead of the device; clocks under load but for boards of 500 W;
reductions in the switch; dropout but of attention's weights; alignment of sizes to tensor cores; the data loader. Rows
are of healthy runs.
"""


def parameters(p: Predicted) -> float:
    """Return about how many parameters a language model has, from its sizes; 0 of other models."""
    layers, hidden = p.row.size("layers"), p.row.size("hidden")
    if p.row.family in ("GPT", "BERT"):
        return 12 * layers * hidden**2 + p.row.size("vocabulary") * hidden
    if p.row.family == "Llama":
        return 11 * layers * (hidden if hidden > 1 else 4096) ** 2
    return 0.0


def line(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def grouping(title: str, found: Sequence[Predicted], key: Callable[[Predicted], str]) -> list[str]:
    """Return the lines of a table of figures by a text."""
    groups = sorted(by(found, key).items())
    head = [line(title, "rows", "median ratio", "median error", "90%", "Spearman"), "|---|---:|---:|---:|---:|---:|"]
    return [*head, *(line(name, *figures(some).cells) for name, some in groups), ""]


def held_out(found: Sequence[Predicted], source: str) -> float:
    """
    Return the median error of a source's rows if predictions were scaled by the median ratio of the other sources' on
    the same kind of GPU: what one fitted constant for each kind would give, held out.
    """
    errors: list[float] = []
    for p in found:
        if p.row.source == source:
            others = by((q for q in found if q.row.source != source and q.row.device == p.row.device), _source)
            scale = median(median(q.ratio for q in some) for some in others.values()) if others else 1.0
            errors.append(abs(p.ratio / scale - 1))
    return median(errors)


def _source(p: Predicted) -> str:
    return p.row.source


def sources(found: Sequence[Predicted], of: Published) -> list[str]:
    """Return the table of sources, and the list of where they are."""
    out = [
        line("source", "year", "GPU", "rows", "median ratio", "median error", "90%", "Spearman", "error if scaled"),
        "|---|---:|---|---:|---:|---:|---:|---:|---:|",
    ]
    for name, some in by(found, _source).items():
        gpus = ", ".join(sorted({p.row.device for p in some}))
        out.append(line(name, str(some[0].row.year), gpus, *figures(some).cells, f"{held_out(found, name):.1%}"))
    out += ["", SCALED]
    out += [f"- {name}: {of.sources[name]}" for name in by(found, _source)]
    return [*out, ""]


def totals(found: Sequence[Predicted]) -> list[str]:
    """Return the table of all rows, and of large language models, by row and with sources weighed alike."""
    own = [p for p in found if p.row.source != "vTrain"]
    large = [p for p in own if parameters(p) >= LARGE]
    out = [
        line("", "rows", "median ratio", "median error", "90%", "Spearman", "sources alike: median", "90%"),
        "|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for name, some in (
        ("all", found),
        ("without vTrain", own),
        ("of these, language models of 1B parameters and more", large),
    ):
        middle, most = weighed(some)
        out.append(line(name, *figures(some).cells, f"{middle:.1%}", f"{most:.1%}"))
    return [*out, ""]


def vtrain(found: Sequence[Predicted]) -> list[str]:
    """Return the table of vTrain's models: which configuration is the fastest matters more than by how much."""
    out = [
        "## vTrain's configurations",
        "",
        "For each model, the rank correlation, the mean error, and by how much the configuration that is predicted to",
        "be the fastest was measured slower than the fastest; beside it the rank correlation of a rule, smaller tp,",
        "then larger micro-batch. vTrain's own simulator: 14.7% on rows of several nodes.",
        "",
        line("model", "rows", "Spearman", "of the rule", "mean error", "fastest predicted, measured slower by"),
        "|---|---:|---:|---:|---:|---:|",
    ]
    rows = [p for p in found if p.row.source == "vTrain"]
    for name, some in by(rows, lambda p: p.row.name.partition(",")[0]).items():
        favourite = min(some, key=lambda p: p.ms).row.ms / min(p.row.ms for p in some) - 1
        ruled = [Predicted(p.row, _rule(p)) for p in some]
        error = sum(p.error for p in some) / len(some)
        ranks = f"{spearman(some):.3f}", f"{spearman(ruled):.3f}"
        out.append(line(name, str(len(some)), *ranks, f"{error:.1%}", f"{favourite:.1%}"))
    error = sum(p.error for p in rows) / len(rows)
    return [*out, line("all", str(len(rows)), f"{spearman(rows):.3f}", "", f"{error:.1%}", ""), ""]


def _rule(p: Predicted) -> float:
    words = dict(word.split(" ") for word in p.row.name.split(", ")[1:])
    return float(words["tp"]) * 1e3 - float(words["micro-batch"])


def every_row(found: Sequence[Predicted]) -> list[str]:
    """Return the table of all rows."""
    out = ["## Every row", "", line("source", "step", "degrees", "measured, ms", "predicted", "ratio")]
    out.append("|---|---|---|---:|---:|---:|")
    for p in found:
        cells = p.row.source, p.row.name, f"`{p.row.degrees}`" if p.row.degrees else ""
        out.append(line(*cells, f"{p.row.ms:,.0f}", f"{p.ms:,.0f}", f"{p.ratio:.2f}"))
    return [*out, ""]


def missing(of: Published) -> list[str]:
    """Return the list of what no line can say, or what was left out before scoring."""
    out = ["## Left out", "", "Before scoring, for a reason each:", ""]
    return [*out, *(f"- {m.source}: {m.name}: {m.reason}." for m in of.missing), ""]


def scored() -> tuple[list[Predicted], Published]:
    """Return the rows that have a prediction, and all that is published."""
    of = published()
    results = known(RESULTS)
    return [results[key] for key in map(key_of, of.rows) if key in results], of


def not_yet(found: Sequence[Predicted], of: Published) -> list[str]:
    """Return a paragraph on the rows that are data, but not predicted yet; nothing if there are none."""
    done = {key_of(p.row) for p in found}
    left = [row for row in of.rows if key_of(row) not in done]
    if not left:
        return []
    counts = {source: sum(row.source == source for row in left) for source in dict.fromkeys(r.source for r in left)}
    said = ", ".join(f"{count} of {source}" for source, count in counts.items())
    return [
        f"**Not predicted yet**: {len(left)} of {len(of.rows)} rows, those that take the longest: {said}.",
        "Large models in stages are predicted worse than others: figures over all rows are too good without them.",
        "",
    ]


def table() -> str:
    """Return the page."""
    found, of = scored()
    parts = [
        HEAD,
        "![predicted against measured](accuracy.svg)\n",
        *totals(found),
        *not_yet(found, of),
        "## By source\n",
        *sources(found, of),
        "## By family, device and year\n",
        *grouping("family", found, lambda p: p.row.family),
        *grouping("GPU", found, lambda p: p.row.device),
        *grouping("family and GPU", found, lambda p: f"{p.row.family}, {p.row.device}"),
        *grouping("year", found, lambda p: str(p.row.year)),
        *grouping("attention", [p for p in found if p.row.family != "convolutional"], lambda p: p.row.attention),
        *vtrain(found),
        WHY,
        *missing(of),
        *every_row(found),
    ]
    return "\n".join(parts).rstrip() + "\n"


COLOURS: Mapping[str, str] = {
    "A100": "#1f77b4",
    "H100": "#d62728",
    "V100": "#2ca02c",
    "P100": "#9467bd",
    "K80": "#8c564b",
}


def picture() -> str:
    """Return a scatter of predicted and measured seconds, both logarithmic, as SVG."""
    found, _ = scored()
    width, margin = 520, 50
    low, high = -1.2, 2.6

    def at(ms: float) -> float:
        return (log10(ms / 1e3) - low) / (high - low) * (width - 2 * margin)

    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{width}"'
        ' font-family="sans-serif" font-size="12">',
        f'<rect width="{width}" height="{width}" fill="white"/>',
    ]
    end = width - margin
    for power in range(-1, 3):
        x, label = margin + at(10.0**power * 1e3), f"{10.0**power:g} s"
        out.append(f'<path d="M{x:.1f} {margin}V{end}M{margin} {width - x:.1f}H{end}" stroke="#ddd"/>')
        out.append(f'<text x="{x:.1f}" y="{end + 16}" text-anchor="middle">{label}</text>')
        out.append(f'<text x="{margin - 6}" y="{width - x + 4:.1f}" text-anchor="end">{label}</text>')
    for by_how_much, dash in ((1.0, ""), (1.2, "4"), (1 / 1.2, "4")):
        y = (log10(by_how_much)) / (high - low) * (width - 2 * margin)
        path = f"M{margin} {end - y:.1f}L{end} {margin - y:.1f}"
        out.append(f'<path d="{path}" stroke="#888" stroke-dasharray="{dash}" fill="none"/>')
    for p in found:
        x, y = margin + at(p.row.ms), end - at(p.ms)
        out.append(
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.5" fill="{COLOURS[p.row.device]}" fill-opacity="0.6">'
            f"<title>{p.row.source}: {p.row.name}: {p.ratio:.2f}</title></circle>"
        )
    for i, (name, colour) in enumerate(COLOURS.items()):
        out.append(f'<circle cx="{margin + 12}" cy="{margin + 12 + 16 * i}" r="4" fill="{colour}"/>')
        out.append(f'<text x="{margin + 22}" y="{margin + 16 + 16 * i}">{name}</text>')
    out.append(f'<text x="{width / 2}" y="{width - 10}" text-anchor="middle">measured (dashed: 20% off)</text>')
    turned = f'transform="translate(14 {width / 2}) rotate(-90)" text-anchor="middle"'
    out.append(f"<text {turned}>predicted</text>")
    return "\n".join([*out, "</svg>"]) + "\n"


def bands() -> str:
    """Return the errors by kind of GPU and family that `--stats` prints, as TOML."""
    found, _ = scored()
    out = ["# Made by docs/update_accuracy.py: errors of predicted against measured steps (docs/accuracy.md).\n"]

    def family(p: Predicted) -> str:
        return "convolutional" if p.row.family == "convolutional" else "transformer"

    for device, some in sorted(by(found, lambda p: p.row.device).items()):
        for name, rows in sorted(by(some, family).items()):
            if len(rows) >= LEAST and device != "K80":
                # K80s are priced at base clocks here, and at boost clocks in the presets.
                f: Figures = figures(rows)
                out += [f"[{device}.{name}]", f"rows = {f.rows}"]
                out += [f"median = {f.median_error:.3f}", f"most = {f.most_error:.3f} # of nine in ten\n"]
    return "\n".join(out).rstrip() + "\n"


MADE: Mapping[Path, Callable[[], str]] = {PATH: table, PICTURE: picture, BANDS: bands}
"""What is made, by its path."""


def write(made: Iterable[tuple[Path, Callable[[], str]]]) -> None:
    for path, text in made:
        path.write_text(text(), encoding="utf-8")


if __name__ == "__main__":
    write(MADE.items())
