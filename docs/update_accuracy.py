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
own, and whether the loss was. How fast those kernels of attention are is from their papers
(`bench/published/kernels/attention.toml`). Products, memory and collectives are as for our own programs: 0.7 of the
device's peaks ([machines.md](machines.md)).
"""

WHY = """\
## Where it errs

- **Tensor parallelism of NeMo.** It overlaps the moves of tensor parallelism with products (userbuffers), which no
  plan here does: Nemotron-4 15B is predicted 18 to 24% too slow, of which the moves that are exposed are more.
- **Products on H100** alone reach 0.78 of the peak (74 shapes that XLA's autotuner measured,
  `bench/published/kernels/matmul_h100.csv`), 0.80 at the best shape; in training, rows whose products are most of the
  step point to 0.62 to 0.65: clocks under load. 0.7 is between. Boards of 500 W are priced at 0.56 (`grand-teton`),
  by a power law through boards of 350 and 700 W.
- **Eager PyTorch** of torchtitan on H100 is predicted 17 to 20% too fast, its compiled steps 6 to 9%: eager code
  takes several kernels for a norm or a rotation, which is one operator here, and its host time is not modelled.
- **Micro-batches of one or two samples under FSDP** (MPT 13B and 30B on 8 GPUs) are measured slower than neighbours
  of larger ones beyond their moves, on the A100 and the H100 alike: what the allocator does when memory is short is
  not modelled.
- **Tensor parallelism over two nodes** (vTrain, tp 16) takes longer than its all-reduces at the adapters' bandwidth;
  three of vTrain's steps (9,839, 8,881 and 6,228 ms) stand out beside their neighbours, and nothing predicts them.
- **BigScience** is predicted 7 to 35% too fast. It ran with `CUDA_LAUNCH_BLOCKING=1`, so that no move was beside a
  kernel, and micro-batches of 1 and 2 are further off than of 4.
- **nanoGPT of December 2022** took twice what its kernels allow: products of 768 columns, and launches.
- **BERT and ResNet on V100** are predicted 4 to 33% too slow: cuBLAS and cuDNN reach more than 0.7 of its peaks.
- **Convolutions** are priced at 0.7 of the peak whatever their shape: AlexNet's on P100 ran as Winograd, above the
  peak of direct ones, Inception's small ones reach less, and so did TF32 in its first cuDNN. K80s are priced at base
  clocks; which they had is not said.

**Not modelled:** host time of eager programs; clocks under load but for boards of 500 W; tile and wave quantisation;
reductions in the switch; overlap of tensor-parallel moves with products; dropout but of attention's weights; the data
loader. Rows are of healthy runs.
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
    head = f"**Not predicted yet**: {len(left)} of {len(of.rows)} rows, pipelines that take long to simulate: {said}."
    return [head, ""]


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
