"""Schedules that compute something else, or never end, are refused; as text they come back, and torch reads it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from random_pipelines import order_sizes, random_schedule
from torch.distributed.pipelining import schedules as torch_schedules

from unity_ir.errors import UnityError
from unity_ir.plan.pipeline.actions import TRANSFERS, StageAction, read_actions
from unity_ir.plan.pipeline.catalogue import pipeline_schedule
from unity_ir.plan.pipeline.csv_text import from_csv, to_csv
from unity_ir.plan.pipeline.schedule import PipelineSchedule
from unity_ir.plan.pipeline.sends import check_sends, with_sends
from unity_ir.plan.pipeline.total_order import check


@pytest.mark.slow
@given(st.integers(0, 10**6), st.booleans(), st.booleans())
def test_valid_orders_pass_with_sends_and_come_back_from_text(seed: int, is_split: bool, is_contiguous: bool):
    schedule = random_schedule(Random(seed), is_split, is_contiguous)
    check(schedule)
    sending = with_sends(schedule)
    check_sends(sending)
    assert sending.computation() == schedule
    assert from_csv(to_csv(schedule), "random") == schedule
    assert from_csv(to_csv(sending), "random") == sending


@given(st.integers(0, 10**6), st.sampled_from(["left out", "doubled", "moved", "halved"]))
def test_computations_missing_doubled_or_elsewhere_are_refused(seed: int, change: str):
    random = Random(seed)
    schedule = random_schedule(random, is_split=True, is_contiguous=True)
    rank = random.randrange(len(schedule.ranks))
    ranks = [list(actions) for actions in schedule.ranks]
    at = random.randrange(len(ranks[rank]))
    action = ranks[rank][at]
    match change:
        case "left out":
            ranks[rank].pop(at)
            error = "missing|waits for" if action.kind != "I" else "missing"
        case "doubled":
            ranks[rank].insert(random.randint(0, len(ranks[rank])), action)
            error = rf": {action} is there twice"
        case "moved":
            ranks.append([ranks[rank].pop(at)])
            error = rf": {action}: stage {rank} is on rank {rank}"
        case _:
            half = action._replace(kind="B" if action.kind == "I" else "W")
            if action.kind not in ("I", "B"):
                return
            ranks[rank].append(half)
            error = "are one backward" if half.kind == "B" or action.kind == "B" else "never"
    with pytest.raises(UnityError, match=rf"^pipeline schedule random, rank \d.*({error})"):
        check(replace(schedule, ranks=tuple(map(tuple, ranks))))


def never_ends(schedule: PipelineSchedule) -> bool:
    """Whether the needs of actions and the orders of ranks make a circle, found from its ends inwards."""
    there = {action for actions in schedule.ranks for action in actions}
    before: dict[StageAction, set[StageAction]] = {}
    for actions in schedule.ranks:
        for last, action in zip([None, *actions], actions, strict=False):
            stage, kind, k = action
            words = {
                "F": [f"{stage - 1}F{k}"],
                "B": [f"{stage}F{k}", f"{stage + 1}B{k}", f"{stage + 1}I{k}"],
                "I": [f"{stage}F{k}", f"{stage + 1}B{k}", f"{stage + 1}I{k}"],
                "W": [f"{stage}I{k}"],
            }[kind]
            needed = {action for word in words if word[0] != "-" for action in read_actions(word)}
            before[action] = (needed & there) | ({last} if last else set())
    while free := [a for a, needed in before.items() if not needed & before.keys()]:
        for a in free:
            del before[a]
    return bool(before)


@given(st.integers(0, 10**6), st.booleans())
def test_ranks_that_wait_for_ever_are_found(seed: int, is_split: bool):
    random = Random(seed)
    schedule = random_schedule(random, is_split, is_contiguous=False)
    ranks = [list(actions) for actions in schedule.ranks]
    for _ in range(random.randint(1, 3)):
        actions = random.choice(ranks)
        i, j = random.randrange(len(actions)), random.randrange(len(actions))
        actions[i], actions[j] = actions[j], actions[i]
    changed = replace(schedule, ranks=tuple(map(tuple, ranks)))
    if never_ends(changed):
        with pytest.raises(UnityError, match=r"waits for \d+[FIB]\d+, which is never done; all ranks wait"):
            check(changed)
    else:
        check(changed)


@given(st.integers(0, 10**6), st.sampled_from(["left out", "doubled", "late", "early", "foreign"]))
def test_sends_and_receives_missing_doubled_or_misplaced_are_refused(seed: int, change: str):
    random = Random(seed)
    schedule = with_sends(random_schedule(random, is_split=True, is_contiguous=False))
    ranks = [list(actions) for actions in schedule.ranks]
    places = [(r, i) for r, actions in enumerate(ranks) for i, a in enumerate(actions) if a.kind in TRANSFERS]
    if not places:
        return
    rank, at = random.choice(places)
    actions = ranks[rank]
    action = actions[at]
    is_send = action.kind.startswith("SEND")
    match change:
        case "left out":
            actions.pop(at)
            error = f"{action} is missing|needs {action} before"
        case "doubled":
            actions.insert(random.randint(0, len(actions)), action)
            error = f"{action} is there twice|needs .* before"
        case "late" | "early":
            # A send before all, a receive behind all.
            actions.pop(at)
            actions.insert(0 if is_send else len(actions), action)
            error = "needs .* before"
        case _:
            foreign = StageAction(schedule.stages - 1, "SEND_F", 0)
            actions.append(foreign)
            error = f"{foreign}: no other rank has its other end"
    with pytest.raises(UnityError, match=rf"^pipeline schedule random, rank \d+: .*({error})"):
        check_sends(replace(schedule, ranks=tuple(map(tuple, ranks))))


def test_ranks_that_send_to_each_other_at_once_are_found():
    """Both block in a send whose receive is behind the other's: the order of each rank is good by itself."""
    schedule = with_sends(pipeline_schedule("1f1b", 2, 2))
    first, second = schedule.ranks
    assert ",".join(map(str, first)) == "0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1"
    assert ",".join(map(str, second)) == "1RECV_F0,1F0,1RECV_F1,1B0,1SEND_B0,1F1,1B1,1SEND_B1"
    late = read_actions("1RECV_F1")
    second = (*(a for a in second[:5] if a not in late), *late, *second[5:])
    error = r"^pipeline schedule 1f1b: send of 0F1: ranks at \[0\] wait for those at \[1\], which does send of 1B0; "
    with pytest.raises(UnityError, match=error):
        check_sends(replace(schedule, ranks=(first, second)))


@pytest.mark.slow
@given(order_sizes(), st.sampled_from(["compute_only", "compute_comms"]))
def test_torch_reads_what_is_written(
    tmp_path_factory: pytest.TempPathFactory,
    size: tuple[str, int, int, int],
    form: Literal["compute_only", "compute_comms"],
):
    """Torch checks the computations it reads, and finds the stages of each rank by itself."""
    schedule = pipeline_schedule(*size)
    p, v = len(schedule.ranks), schedule.stages // len(schedule.ranks)
    path: Path = tmp_path_factory.getbasetemp() / "schedule.csv"
    path.write_text(to_csv(with_sends(schedule) if form == "compute_comms" else schedule))
    stages = [SimpleNamespace(num_stages=p * v, group_size=p, group_rank=0, is_last=False) for _ in range(v)]
    theirs = torch_schedules._PipelineScheduleRuntime(stages, schedule.micro_batches)
    theirs._load_csv(str(path), form)
    assert tuple(theirs.stage_index_to_group_rank[s] for s in range(p * v)) == schedule.rank_of
    if form == "compute_comms":
        theirs._simulate()
        theirs._dump_csv(str(path), form)
        assert from_csv(path.read_text(), "torch").ranks == with_sends(schedule).ranks
    else:
        # Torch's own words for gathers, reductions, sends and receives are read, and pass the check.
        theirs._dump_csv(str(path), "compute_comms")
        assert from_csv(path.read_text(), "torch").computation().ranks == schedule.ranks


def test_pairs_of_forward_and_backward_are_read_as_one_after_the_other():
    assert read_actions("(0F4;3B1)OVERLAP_F_B") == (StageAction(0, "F", 4), StageAction(3, "B", 1))
    assert read_actions(" ") == ()
    assert read_actions("12UNSHARD") == (StageAction(12, "UNSHARD"),)


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("", ": the file is empty; write a row per rank, such as 0F0,0B0"),
        ("0F0,0B0\n\n1F0", ", rank 1: the row is empty; leave it out, or give the rank a stage"),
        ("0F0,0C0", ", rank 0: pipeline action '0C0': not a word such as 2F0, 1I3, 1W3, 0B2 or 2SEND_F0"),
        ("0F0,0F00000000000", ", rank 0: pipeline action '0F00000000000': not a word"),
        ("0F,0B0", ", rank 0: pipeline action '0F': it has no micro-batch; write it behind"),
        ("0UNSHARD1", ", rank 0: pipeline action '0UNSHARD1': it is of all micro-batches; leave out the last number"),
        ("0F0,0B0\n2F0,2B0", ": stage 1 has no actions; number stages from 0 without gaps"),
        ("0F0,0B0,0F0", ", rank 0: 0F0 is there twice; leave one out"),
        ("0F0", ", rank 0: 0B0 is missing; add it"),
        ("0F0,0I0", ", rank 0: 0W0 is missing; add it"),
        ("0F0,0B0,0F2,0B2", ", rank 0: 0F1 is missing; add it"),
        ("0F0,0B0,1F0\n1B0", ", rank 1: 1B0: stage 1 is on rank 0; move the action there"),
        ("0F0,0B0,0W0", ", rank 0: 0W0 and 0B0 are one backward; leave one out"),
        ("0B0,0F0", ", rank 0: 0B0 waits for 0F0, which is never done; all ranks wait, so change the order"),
        ("0F0,0SEND_F0,0B0\n1F0,1B0", ", rank 0: 0B0 needs 0RECV_B0 before it; change their order"),
        ("0UNSHARD", ": nothing is computed; add actions such as 0F0,0B0"),
    ],
)
def test_text_that_is_no_schedule_is_refused_in_one_line(text: str, error: str):
    with pytest.raises(UnityError, match=f"^pipeline schedule file.csv{error}"):
        from_csv(text, "file.csv")
