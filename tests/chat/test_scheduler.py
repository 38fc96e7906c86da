"""The queue and the hand-over between threads, with scripted responses in place of a model."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import pytest

from eagle_mars.chat.response import Response, merged
from eagle_mars.chat.scheduler import ClosedError, DecodingError, QueueFullError, Scheduler
from eagle_mars.errors import LogitsError
from eagle_mars.stream import Piece


class Script:
    """Stands for a ResponseStream: `length` cycles, each of which waits for `gate` and notes its name in `log`."""

    def __init__(self, name: str, length: int, log: list[str], gate: threading.Event | None = None, error=None) -> None:
        self.name, self.length, self.log, self.gate, self.error = name, length, log, gate, error
        self.closed = False
        self._run = self._cycles()

    def _cycles(self) -> Iterator[tuple[Piece, ...]]:
        for number in range(self.length):
            if self.gate is not None:
                assert self.gate.wait(30)
            self.log.append(self.name)
            if self.error is not None and number == 1:
                raise self.error
            yield (Piece(f"{self.name}{number}", "target", (number,)),)

    def cycles(self) -> Iterator[tuple[Piece, ...]]:
        return self._run

    def close(self) -> None:
        self.closed = True
        self._run.close()

    @property
    def result(self) -> str:
        return f"result of {self.name}"


def response(name: str, length: int, log: list[str], gate=None, error=None) -> Response:
    return Response(Script(name, length, log, gate, error), 1)


def text(response: Response) -> str:
    return " ".join(piece.text for group in response for piece in group)


@pytest.fixture
def started() -> Iterator[list[Scheduler]]:
    schedulers: list[Scheduler] = []
    yield schedulers
    for scheduler in schedulers:
        scheduler.close()


def scheduler(started: list[Scheduler], active: int, waiting: int, **options) -> Scheduler:
    started.append(Scheduler(active, waiting, **options))
    return started[-1]


def test_active_responses_take_turns_and_the_rest_waits_in_order(started) -> None:
    log: list[str] = []
    gate = threading.Event()
    queue = scheduler(started, active=2, waiting=8)
    responses = [response(name, 3, log, gate) for name in "abcd"]
    for item in responses:
        queue.submit(item)
    gate.set()
    assert [text(item) for item in responses] == [f"{n}0 {n}1 {n}2" for n in "abcd"]
    first, second = log[:6], log[6:]
    assert sorted(first) == ["a"] * 3 + ["b"] * 3
    assert sorted(second) == ["c"] * 3 + ["d"] * 3
    assert "aa" not in "".join(log[1:5])  # in turns once both are there
    assert [item.result for item in responses] == [f"result of {n}" for n in "abcd"]


def test_a_full_queue_refuses_and_a_waiting_client_that_leaves_makes_room(started) -> None:
    log: list[str] = []
    gate = threading.Event()
    queue = scheduler(started, active=1, waiting=1)
    running, waiting, late = (response(name, 2, log, gate) for name in ("running", "waiting", "late"))
    queue.submit(running)
    queue.submit(waiting)
    with pytest.raises(QueueFullError, match="try again later"):
        queue.submit(late)
    waiting.cancel()
    queue.submit(late)
    assert waiting.outcome == "cancelled"
    assert text(waiting) == ""
    gate.set()
    assert text(running) == "running0 running1"
    assert text(late) == "late0 late1"
    assert "waiting" not in log


def test_cancellation_takes_effect_within_one_cycle_and_frees_the_state(started) -> None:
    log: list[str] = []
    gate = threading.Event()
    queue = scheduler(started, active=1, waiting=1)
    stopped, after = response("stopped", 1000, log, gate), response("after", 1, log)
    script = stopped._stream
    queue.submit(stopped)
    queue.submit(after)
    stopped.cancel()
    assert text(stopped) == ""
    gate.set()
    assert text(after) == "after0"
    assert log.count("stopped") <= 1
    assert script.closed
    assert stopped._stream is None
    with pytest.raises(RuntimeError, match="no result"):
        _ = stopped.result


@pytest.mark.parametrize(
    ("error", "seen"), [(LogitsError("NaN"), LogitsError), (RuntimeError("out of memory"), DecodingError)]
)
def test_six_crashes_cost_the_next_request_nothing(started, error, seen) -> None:
    log: list[str] = []
    ended: list[str | None] = []
    queue = scheduler(started, active=2, waiting=8, on_end=lambda item: ended.append(item.outcome))
    bad = [response(f"bad{i}", 3, log, error=error) for i in range(6)]
    good = response("good", 2, log)
    for item in [*bad, good]:
        queue.submit(item)
    assert text(good) == "good0 good1"
    for item in bad:
        with pytest.raises(seen):
            item.wait()
    queue.close()
    assert sorted(filter(None, ended)) == ["failed"] * 6 + ["finished"]
    assert (queue.active, queue.waiting) == (0, 0)


def test_an_observer_that_fails_does_not_stop_decoding(started) -> None:
    def observer(item: Response) -> None:
        raise ValueError("broken metrics")

    queue = scheduler(started, active=1, waiting=2, on_end=observer)
    both = [response(name, 1, []) for name in "ab"]
    for item in both:
        queue.submit(item)
    assert [text(item) for item in both] == ["a0", "b0"]
    assert queue.alive


def test_closing_cancels_everything_and_refuses_the_rest(started) -> None:
    gate = threading.Event()
    queue = scheduler(started, active=1, waiting=2)
    both = [response(name, 1000, [], gate) for name in "ab"]
    for item in both:
        queue.submit(item)
    threading.Timer(0.05, gate.set).start()
    queue.close()
    assert [item.outcome for item in both] == ["cancelled", "cancelled"]
    assert not queue.alive
    with pytest.raises(ClosedError):
        queue.submit(response("late", 1, []))


def test_several_responses_merge_in_an_event_loop(started) -> None:
    queue = scheduler(started, active=2, waiting=8)

    async def collect() -> dict[int, list[str]]:
        responses = [response(name, 3, []) for name in "abc"]
        for item in responses:
            queue.submit(item)
        texts: dict[int, list[str]] = {0: [], 1: [], 2: []}
        async for index, pieces in merged(responses):
            texts[index].append("end" if pieces is None else " ".join(piece.text for piece in pieces))
        return texts

    texts = asyncio.run(asyncio.wait_for(collect(), 30))
    assert {i: " ".join(parts) for i, parts in texts.items()} == {
        i: f"{name}0 {name}1 {name}2 end" for i, name in enumerate("abc")
    }


def test_what_has_ended_before_anyone_listens_is_read_to_its_end(started) -> None:
    queue = scheduler(started, active=1, waiting=1)
    item, after = response("a", 2, []), response("b", 1, [])
    queue.submit(item)
    queue.submit(after)
    assert text(after) == "b0"

    async def read() -> list[str]:
        return [piece.text async for group in item for piece in group]

    assert asyncio.run(asyncio.wait_for(read(), 30)) == ["a0", "a1"]


def test_an_event_loop_that_has_closed_cancels_its_response(started) -> None:
    gate = threading.Event()
    queue = scheduler(started, active=1, waiting=1)
    item = response("a", 1000, [], gate)

    async def leave() -> None:
        queue.submit(item)
        reading = asyncio.ensure_future(anext(aiter(item)))
        await asyncio.sleep(0)
        reading.cancel()

    asyncio.run(leave())
    gate.set()
    after = response("b", 1, [])
    queue.submit(after)
    assert text(after) == "b0"
    assert item.cancelled
