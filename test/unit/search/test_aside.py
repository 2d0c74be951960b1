"""Work in a second process answers as it does in turn, fails as it does, and leaves nothing behind."""

from __future__ import annotations

import os
import pickle
import signal
from collections.abc import Iterator

import pytest
from graphs import boxes

from unity_ir import models
from unity_ir.pcg.graph import Graph
from unity_ir.pcg.optimizer import Optimizer
from unity_ir.search import run, worker
from unity_ir.search.layouts.limits import limited
from unity_ir.search.worker import ForkedWorker
from unity_ir.simulate.report import EmittedStep, as_emitted, simulated_beside

WAYS = pytest.mark.parametrize("beside", [True, False])


@pytest.fixture(autouse=True)
def processors(monkeypatch: pytest.MonkeyPatch):
    """As many as a second process wants, and no threads of other tests."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    monkeypatch.setattr(worker.threading, "active_count", lambda: 1)


def square(number: int) -> tuple[int, int]:
    return number * number, os.getpid()


@WAYS
def test_each_question_has_its_answer(beside: bool):
    with ForkedWorker(square, beside=beside) as squares:
        answers = [squares.ask(number) for number in range(3)]
        found = [answer() for answer in reversed(answers)]
    assert [n for n, _ in found] == [4, 1, 0]
    assert ({process for _, process in found} == {os.getpid()}) == (not beside)


@WAYS
def test_what_the_function_raises_is_raised(beside: bool):
    with ForkedWorker[str, int](int, beside=beside) as numbers:
        one, wrong, two = map(numbers.ask, ("1", "one", "2"))
        assert one() == 1
        with pytest.raises(ValueError, match="one"):
            wrong()
        assert two() == 2


def test_what_is_done_ahead_ends_when_something_is_asked():
    done: list[int] = []

    def ahead() -> Iterator[None]:
        while True:
            done.append(len(done))
            yield

    def count(_: None) -> int:
        return len(done)

    with ForkedWorker(count, ahead()) as counts:
        assert counts.ask(None)() > 0
    assert not done
    with ForkedWorker(count, ahead(), beside=False) as counts:
        assert counts.ask(None)() == 0


def gone(process: int) -> bool:
    """Whether there is no such process, not even one that nobody waited for."""
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return True
    return False


def test_no_process_is_left():
    with ForkedWorker(square) as squares:
        _, process = squares.ask(1)()
        assert not gone(process)
    assert gone(process)

    def forever(_: int) -> None:
        signal.pause()

    with ForkedWorker(forever) as never:
        assert never._process is not None
        process = never._process.number
        never.ask(1)
    assert gone(process)


def test_a_fork_does_not_read_what_is_for_another():
    with ForkedWorker(square) as squares:
        answer = squares.ask(3)

        def of_fork(_: None) -> tuple[tuple[int, int], int]:
            return answer(), os.getpid()

        with ForkedWorker(of_fork) as fork:
            (number, process), own = fork.ask(None)()
        assert (number, process) == (9, own)
        number, process = answer()
        assert number == 9
        assert process not in (own, os.getpid())


def test_plans_that_another_process_simulates_are_not_simulated_here():
    graph, machine, optimizer = run(models.build("mlp", layers=2), boxes(2)).graph, boxes(2), Optimizer("lion")
    with simulated_beside(machine, optimizer) as expect:
        expect(graph, lambda: EmittedStep(1.0, 2, 0, 1.0))
        assert as_emitted(graph, machine, Optimizer("adam"))[0] != 1.0
        assert as_emitted(graph, machine, optimizer) == (1.0, 2)
    other = Optimizer("momentum")
    with simulated_beside(machine, other) as expect:
        expect(graph, lambda: EmittedStep(1.0, 2, 0, 1.0))
    assert as_emitted(graph, machine, other)[0] != 1.0


def test_a_process_that_others_end_is_not_missed():
    with ForkedWorker(square) as squares:
        assert squares._process is not None
        os.kill(squares._process.number, signal.SIGKILL)
        assert squares.ask(3)() == (9, os.getpid())


def test_nor_one_that_is_not_there_to_wait_for():
    """As in programs that ignore SIGCHLD, or wait for whatever ends."""
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        with ForkedWorker(square) as squares:
            assert squares.ask(3)()[1] != os.getpid()
    finally:
        signal.signal(signal.SIGCHLD, before)
    with ForkedWorker(square) as squares:
        assert squares._process is not None
        os.kill(squares._process.number, signal.SIGKILL)
        os.waitpid(squares._process.number, 0)


@pytest.mark.parametrize("name", ["fork", "memfd_create"])
def test_where_no_process_is_to_be_had_it_is_done_in_turn(name: str, monkeypatch: pytest.MonkeyPatch):
    def refused(*_: object) -> None:
        raise BlockingIOError("no more")

    monkeypatch.setattr(os, name, refused)
    before = len(os.listdir("/proc/self/fd"))
    with ForkedWorker(square) as squares:
        assert squares.ask(3)() == (9, os.getpid())
    assert len(os.listdir("/proc/self/fd")) == before


def test_ctrl_c_at_the_fork_leaves_no_process(monkeypatch: pytest.MonkeyPatch):
    fork, made = os.fork, list[int]()

    def interrupted() -> int:
        made.append(fork())
        if made[-1]:
            os.kill(os.getpid(), signal.SIGINT)
        return made[-1]

    monkeypatch.setattr(os, "fork", interrupted)
    # Shells have what they start beside them ignore the signal.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt), ForkedWorker(square):
            pass
    finally:
        signal.signal(signal.SIGINT, before)
    assert len(made) == 1
    assert gone(made[0])


def test_nobody_waits_for_answers_to_be_read():
    with ForkedWorker[bytes, bytes](bytes) as many:
        answers = [many.ask(bytes([n]) * 100_000) for n in range(20)]
        assert [answer()[0] for answer in answers] == list(range(20))


def test_ctrl_c_is_for_the_first_process():
    with ForkedWorker(square) as squares:
        assert squares._process is not None
        os.kill(squares._process.number, signal.SIGINT)
        assert squares.ask(3)()[1] != os.getpid()


def test_with_other_threads_or_one_processor_there_is_none(monkeypatch: pytest.MonkeyPatch):
    assert worker._processor_left()
    monkeypatch.setattr(worker.threading, "active_count", lambda: 2)
    assert not worker._processor_left()
    monkeypatch.undo()
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})
    assert not worker._processor_left()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["tables", "messages"])
def test_a_search_is_the_same_in_one_process(kind: str, monkeypatch: pytest.MonkeyPatch):
    changes = {"group_rows": 0} | ({"count_pairs": -1} if kind == "messages" else {})
    graph, machine = models.build("mlp", layers=4), boxes(16, overhead=1e-6)
    with limited(**changes):
        both = run(graph, machine)
        monkeypatch.setattr(worker, "_processor_left", lambda: False)
        alone = run(graph, machine)
    assert (both.graph, both.bound, both.gap) == (alone.graph, alone.bound, alone.gap)
    assert both.bound is not None


@pytest.mark.sampled(2)
@pytest.mark.parametrize("model", ["mlp", "alexnet"])
def test_rewrites_and_groupings_are_the_same_in_one_process(model: str, monkeypatch: pytest.MonkeyPatch):
    graph, machine = models.build(model), boxes(16, overhead=1e-6)
    with limited(group_rows=0, rows_of_process=0):
        both = run(graph, machine)
        monkeypatch.setattr(worker, "_processor_left", lambda: False)
        alone = run(graph, machine)
    assert both.derivation
    assert (both.graph, both.derivation, both.explored) == (alone.graph, alone.derivation, alone.explored)
    assert (both.bound, both.gap) == (alone.bound, alone.gap)


@pytest.mark.slow
def test_graphs_are_sent_whole():
    plan = run(models.build("mlp", layers=4), boxes(2, 2)).graph
    again: Graph = pickle.loads(pickle.dumps(plan))
    assert again == plan
    assert again.nodes() == plan.nodes()
    deep = models.build("mlp", layers=2000)
    assert pickle.loads(pickle.dumps(deep)) == deep
