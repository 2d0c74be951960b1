"""A report has the plan's own figures, and texts of a user's file cannot become markup or script in it."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
from markup_names import FUNCTION, MODEL, NASTY

import unity_ir as ui
from unity_ir.cost.plan import cost
from unity_ir.pcg.sharding import role_name
from unity_ir.pcg.types import ELEMENT_BYTES
from unity_ir.plan.plan import plan_graph
from unity_ir.report.graph import NodeRow, graph_data, segments
from unity_ir.report.links import link_loads
from unity_ir.report.page import as_json
from unity_ir.report.timeline import timeline_data
from unity_ir.simulate.full import Timeline, simulate
from unity_ir.simulate.memory import held_over_time
from unity_ir.simulate.replay import replay
from unity_ir.tools.unity_opt import main


class Page(HTMLParser):
    """The scripts of a page, and how many elements of each kind it has."""

    def __init__(self, text: str):
        super().__init__()
        self.counts: dict[str, int] = {}
        self.scripts: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.counts[tag] = self.counts.get(tag, 0) + 1
        if tag == "script":
            self.scripts.append("")

    def handle_data(self, data: str) -> None:
        if self.cdata_elem == "script":
            self.scripts[-1] += data

    @property
    def data(self) -> dict[str, Any]:
        return json.loads(self.scripts[0])


def written(plan: ui.Plan, path: Path, **options: Any) -> Page:
    plan.report(path / "report.html", **options)
    return Page((path / "report.html").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def gpt2() -> ui.Plan:
    sizes = {"batch": 4, "layers": 4, "hidden": 16, "heads": 2, "vocabulary": 32, "sequence": 8}
    return ui.plan("gpt2", **sizes, machine="dgx-h100:2x2", degrees="tp=2,dp=2,zero=1", optimizer="adam")


def timeline_of(plan: ui.Plan) -> Timeline:
    return simulate(replay(plan_graph(plan.graph, plan.machine), plan.machine))


def test_the_graph_has_the_seconds_and_bytes_of_the_plan(gpt2: ui.Plan):
    plan = cost(gpt2.graph, gpt2.machine)
    data: Any = graph_data(gpt2.graph, plan)
    nodes: list[NodeRow] = data["nodes"]
    kernels = sum(row.forward + row.backward for row in nodes)
    assert kernels == pytest.approx((plan.compute_time - plan.update) * 1e9, abs=len(nodes))
    assert sum(m.forward + m.backward for m in data["moves"]) == pytest.approx(plan.communication_time * 1e9, abs=300)
    assert sum(m.bytes for m in data["moves"]) == plan.bytes
    # Layouts are those of the assignment, an entry for each mesh axis.
    placed = {i: node for i, node in enumerate(n for s in segments(gpt2.graph) for n in s.nodes)}
    for i, row in enumerate(nodes):
        roles = plan.placement.assignments.get(placed[i], plan.placement.layouts[placed[i].results[0]])
        assert [data["texts"][t] for t in data["layouts"][row.layout]] == [role_name(role) for role in roles]
    assert [level for _, level in data["axes"]] == ["nodes", "gpus"]


def test_moves_lead_to_the_operators_that_read_what_is_moved(gpt2: ui.Plan):
    data: Any = graph_data(gpt2.graph, cost(gpt2.graph, gpt2.machine))
    rows: list[NodeRow] = data["nodes"]
    assert any(move.users for move in data["moves"])
    for move in data["moves"]:
        assert all(move.made in rows[user].operands for user in move.users)


def test_equal_layers_are_found(gpt2: ui.Plan):
    data: Any = graph_data(gpt2.graph, cost(gpt2.graph, gpt2.machine))
    layers = [s for s in data["segments"] if s.title.startswith("layer ")]
    assert [s.title for s in layers] == [f"layer {i}" for i in range(1, 5)]
    assert len({s.like for s in layers[1:]}) == 1
    assert sum(s.nodes for s in data["segments"]) == len(data["nodes"])
    assert data["segments"][0].title == "before the layers"


def test_layers_of_other_stages_are_not_alike():
    """They have the same operators, on another part of the machine."""
    sizes = {"batch": 16, "hidden": 16, "layers": 9, "classes": 16}
    plan = ui.plan("mlp", **sizes, machine="2gpu", search="data-parallel", micro_batches=4, stages=2)
    data: Any = graph_data(plan.graph, cost(plan.graph, plan.machine))
    rows: list[NodeRow] = data["nodes"]
    alike: dict[int, set[str]] = {}
    for segment in data["segments"]:
        if segment.title.startswith("layer"):
            last = rows[segment.begin + segment.nodes - 1]
            alike.setdefault(segment.like, set()).add(data["texts"][last.divided])
    assert {"at 0 by 2", "at 1 by 2"} <= set.union(*alike.values())
    assert all(len(ways) == 1 for ways in alike.values())


@pytest.mark.slow
def test_the_timeline_unpacks_to_what_was_simulated(gpt2: ui.Plan):
    timeline = timeline_of(gpt2)
    data: Any = timeline_data(timeline)
    assert data["length"] == pytest.approx(timeline.seconds * 1e9, abs=1)
    (only,) = data["classes"]
    for stream, lane in enumerate(only["lanes"]):
        lengths = lane["length"]
        assert len(lengths) == len(lane["since"]) == len(lane["label"])
        assert sum(lengths) == pytest.approx(timeline.busy(stream) / 1000, abs=len(lengths))
        assert sum(lane["since"]) + sum(lengths) <= data["length"]
        assert min((*lane["since"], *lengths), default=0) >= 0
    curve = held_over_time(timeline, 0)
    assert max(accumulate(only["memory"]["bytes"])) == curve.peak == gpt2.stats.peak
    named = {data["texts"][text] for _, text, _ in data["labels"]}
    assert any(text.startswith("all_reduce of ") for text in named)


def test_links_carry_what_the_plan_moves(gpt2: ui.Plan):
    plan, timeline = cost(gpt2.graph, gpt2.machine), timeline_of(gpt2)
    loads = link_loads(plan, timeline)
    assert [load.level for load in loads] == ["nodes", "gpus"]
    for i, load in enumerate(loads):
        # The mesh has an axis for each level.
        crossing = [(m, dtype) for m, dtype in plan.moves if i in m.axes]
        assert load.bytes == sum(m.traffic(plan.machine.mesh) * ELEMENT_BYTES[dtype] for m, dtype in crossing) > 0
        assert load.share is not None
        assert 0 < load.share <= 1
        assert load.busy == pytest.approx(timeline.busy(1 + i) / 1e12)


def test_a_report_says_what_stats_say(gpt2: ui.Plan, tmp_path: Path):
    data = written(gpt2, tmp_path).data
    lines = gpt2.stats.text.splitlines()
    for word, text in data["facts"]:
        assert f"  {word:<14} {text}" in lines
    assert {"time", "simulated", "peak", "throughput", "memory"} <= {word for word, _ in data["facts"]}
    figures = {each["label"]: each["value"] for each in data["figures"]}
    assert f"simulated      {figures['step']} if" in gpt2.stats.text
    assert figures["tokens per second"] == f"{gpt2.stats.tokens_per_second:,.0f}"
    assert data["alternatives"] is data["difference"] is None


def test_names_of_a_users_file_never_become_markup(tmp_path: Path):
    plan = ui.plan(MODEL, machine="2gpu", search="data-parallel")
    page = written(plan, tmp_path)
    assert page.counts["script"] == 2
    assert page.counts["title"] == 1
    assert page.data["name"] == FUNCTION
    assert "b" not in page.counts
    assert NASTY in page.data["graph"]["texts"], "the name must be shown as it is"
    assert "innerHTML" not in page.scripts[1]
    plain = written(
        ui.plan(MODEL.replace(NASTY, "w").replace(FUNCTION, "f"), machine="2gpu", search="data-parallel"), tmp_path
    )
    assert page.counts == plain.counts
    assert page.scripts[1] == plain.scripts[1]


@pytest.mark.parametrize("text", ["</script>", "<!--", "]]>", "&lt;", "{{data}}"])
def test_json_is_safe_in_a_script_element(text: str):
    assert not set(as_json([text])) & set("<>&")
    assert json.loads(as_json([text])) == [text]


def test_another_plan_and_baselines_are_compared(tmp_path: Path):
    options = {"batch": 8, "hidden": 16, "layers": 2, "classes": 4, "machine": "2gpu", "optimizer": "adamw"}
    plan, other = (ui.plan("mlp", search=search, **options) for search in ("data-parallel", "fsdp"))
    data = written(plan, tmp_path, against=other, baselines=True).data
    assert ["weight dense*.weight", "repeat by 2", "dim 0 by 2", 2] in data["difference"]["layouts"]
    assert [row[0] for row in data["difference"]["figures"]][:2] == ["simulated", "all waited for"]
    named = {each["name"]: each for each in data["alternatives"]}
    assert named["data-parallel"]["seconds"] == pytest.approx(plan.stats.seconds)
    assert named["fsdp"]["bytes"] > 0
    own, *others = data["alternatives"]
    assert {**own, "name": "data-parallel"} == named["data-parallel"], "it is that plan"
    assert [each["seconds"] for each in others] == sorted(each["seconds"] for each in others)


def test_micro_batches_and_pipelines(tmp_path: Path):
    sizes = {"batch": 16, "hidden": 16, "layers": 4, "classes": 4}
    plan = ui.plan("mlp", **sizes, machine="2gpu", search="data-parallel", micro_batches=4)
    assert written(plan, tmp_path).data["timeline"]["note"].startswith("the first 3 of 4 micro-batches")
    plan = ui.plan("mlp", **sizes, machine="2gpu", search="data-parallel", micro_batches=4, stages=2)
    data = written(plan, tmp_path).data
    assert len(data["timeline"]["classes"]) == 2
    assert data["timeline"]["note"].startswith("moves inside of a stage are part of its tasks")
    assert data["links"][0]["bytes"] > 0
    assert data["links"][0]["busy"] is None
    assert data["timeline"]["length"] == pytest.approx(plan.stats.seconds * 1e9, abs=1)


def test_the_command_line_writes_the_same_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    named = "--model=mlp,batch=8,hidden=16,layers=2,classes=4"
    saved, report = tmp_path / "plan.pcg", tmp_path / "report.html"
    arguments = [named, "--search=data-parallel,optimizer=adam", "--machine=2gpu", "-o", str(saved)]
    assert main([*arguments, "--report", str(report)]) == 0
    page = report.read_text(encoding="utf-8")
    ui.load(saved).report(report)
    assert report.read_text(encoding="utf-8") == page
    assert main([str(saved), "--report", str(report), "--against", str(saved), "-o", "/dev/null"]) == 0
    assert not Page(report.read_text(encoding="utf-8")).data["difference"]["layouts"]
    capsys.readouterr()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--against=x.pcg"], "unity-opt: --against is compared in a report; add --report=FILE.html"),
        (["--baselines"], "unity-opt: --baselines is compared in a report; add --report=FILE.html"),
        (["--report="], "unity-opt: --report is empty; name a file"),
        (["--report=r.html", "--against=none.pcg"], "none.pcg: No such file or directory"),
        (["--report=r.html", "--against="], "unity-opt: --against is empty; name a file"),
        (
            ["--report=r.html", "--baselines", "-p", "pcg-differentiate"],
            "@lenet: baselines are of a forward, but it has its backward; plan the forward alone",
        ),
        (
            ["--report=r.html", "-p", "pcg-differentiate,lower-pcg-to-spmd"],
            "unity-opt: --report shows a plan, but the module is lowered; leave out lower-pcg-to-spmd",
        ),
    ],
)
def test_wrong_options_are_one_line(
    arguments: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
):
    monkeypatch.chdir(tmp_path)
    assert main(["--model=lenet", "--search=data-parallel", "--machine=2gpu", *arguments]) == 1
    assert capsys.readouterr().err.strip() == message
    assert not list(tmp_path.iterdir())


def test_a_step_with_its_backward_is_one_segment(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    report = tmp_path / "report.html"
    arguments = ["--model=lenet", "--search=data-parallel", "--machine=2gpu", "-p", "pcg-differentiate"]
    assert main([*arguments, "--report", str(report)]) == 0
    capsys.readouterr()
    data = Page(report.read_text(encoding="utf-8")).data
    assert [title for title, *_ in data["graph"]["segments"]] == ["step"]
    assert "sgd of conv1.weight" in data["timeline"]["texts"]
