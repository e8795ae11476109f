"""All schedules of the exchange protocol of ``csrc/exchange.cuh``, and of broken ones.

A rank runs its calls one after the other; in a call each word it exchanges has a thread of its own,
and threads run in any order. Their steps are what the kernel does with one word:

    header   tell a peer that this call has begun
    send     write a word into a peer's slot
    receive  wait until a word of the own slot is not empty, take it, empty it again
    meet     wait for a peer's header of this call

A rank's next call begins when all threads of this one have ended. What no schedule may do: take a
word of another call or source, write over a word that was not taken, or come to a standstill. Words
carry the call and the rank that sent them, so that this shows. Every reachable state is visited. Of
three ranks, whose states are too many, a rank has three threads, which take their steps in order:
one for headers and sends, one for receives, one for meets.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from moetail.spec import owned_tokens


@dataclass(frozen=True)
class Protocol:
    """The parts of the protocol that a broken one lacks."""

    slots: int = 2
    meets: bool = True
    counted: bool = True  # the call's number chooses the slot and is in the header
    streamed: bool = False  # a block takes what was sent in a step, sends the next, and so on
    empties: str = "on taking"  # or "never", or "in the next call"


Word = tuple[int, int] | None  # (call, source); None: empty
Step = tuple[str, int, int]  # what, the peer, the row
Thread = tuple[Step, ...]  # what is left of it
State = tuple[
    tuple[int, ...],  # the call of each rank
    tuple[frozenset[Thread], ...],  # its threads that have not ended
    frozenset[tuple[int, int, int, Word]],  # (rank, slot, row, word), where not empty
    frozenset[tuple[int, int, int, int]],  # (rank, slot, source, call) of headers
]


class Wrong(AssertionError):
    """What a schedule did."""


class Model:
    """``calls``: for each call the tokens; negative: an all-reduce of as many."""

    def __init__(self, ranks: int, calls: tuple[int, ...], protocol: Protocol) -> None:
        self.ranks, self.calls, self.protocol = ranks, calls, protocol

    def rows_of(self, call: int, source: int) -> list[int]:
        """Rows of a peer's slot that ``source`` fills in this call."""
        size = self.calls[call]
        if size < 0:
            return [token * self.ranks + source for token in range(-size)]
        return list(owned_tokens(size, self.ranks, source))

    def slot(self, call: int) -> int:
        return call % self.protocol.slots if self.protocol.counted else 0

    def threads(self, rank: int, call: int) -> frozenset[Thread]:
        if call == len(self.calls):
            return frozenset()
        out: list[Step] = []
        taken: list[Step] = []
        met: list[Step] = []
        for peer in range(self.ranks):
            if peer == rank:
                continue
            out.append(("header", peer, 0))
            out += [("send", peer, row) for row in self.rows_of(call, rank)]
            taken += [("receive", peer, row) for row in self.rows_of(call, peer)]
            if self.protocol.meets:
                met.append(("meet", peer, 0))
            if self.protocol.empties == "in the next call" and call > 0:
                met += [("empty", peer, row) for row in self.rows_of(call - 1, peer)]
        if self.protocol.streamed:
            inner = [step for step in out if step[0] == "header"]
            first = {peer: self.rows_of(call, peer)[:1] for peer in range(self.ranks)}

            def turn(step: Step) -> tuple[int, bool]:
                """Sends of a turn come first, then what the peers sent in it."""
                source = rank if step[0] == "send" else step[1]
                return step[2] - first[source][0], step[0] == "receive"

            inner += sorted((s for s in (*out, *taken) if s[0] != "header"), key=turn)
            return frozenset(steps for steps in (tuple(inner), tuple(met)) if steps)
        if self.ranks == 2:
            return frozenset((step,) for step in (*out, *taken, *met))
        return frozenset(tuple(steps) for steps in (out, taken, met) if steps)

    def start(self) -> State:
        threads = tuple(self.threads(rank, 0) for rank in range(self.ranks))
        return (0,) * self.ranks, threads, frozenset(), frozenset()

    def after(self, state: State) -> Iterator[State]:
        """Every state one step further; a rank whose threads have all ended is in its next call."""
        calls, threads, words, headers = state
        memory = {(rank, slot, row): word for rank, slot, row, word in words}
        for rank in range(self.ranks):
            for thread in threads[rank]:
                step = self._step(rank, calls[rank], thread[0], memory, headers)
                if step is None:
                    continue
                new_memory, new_headers = step
                left = threads[rank] - {thread}
                if len(thread) > 1:
                    left |= {thread[1:]}
                new_calls = calls
                if not left:
                    call = calls[rank] + 1
                    new_calls = (*calls[:rank], call, *calls[rank + 1 :])
                    left = self.threads(rank, call)
                yield (
                    new_calls,
                    (*threads[:rank], left, *threads[rank + 1 :]),
                    frozenset((*place, word) for place, word in new_memory.items()),
                    new_headers,
                )

    def _step(
        self,
        rank: int,
        call: int,
        step: Step,
        memory: dict[tuple[int, int, int], Word],
        headers: frozenset[tuple[int, int, int, int]],
    ) -> tuple[dict[tuple[int, int, int], Word], frozenset[tuple[int, int, int, int]]] | None:
        """Memory and headers after it, or None where it waits."""
        what, peer, row = step
        slot = self.slot(call)
        number = call if self.protocol.counted else 0
        if what == "header":
            kept = {h for h in headers if h[:3] != (peer, slot, rank)}
            return memory, frozenset(kept | {(peer, slot, rank, number)})
        if what == "meet":
            return (memory, headers) if (rank, slot, peer, number) in headers else None
        if what == "empty":  # not a part of the protocol, but of another one
            place = (rank, self.slot(call - 1), row)
            word = memory.get(place)
            if word is not None and word != (call - 1, peer):
                raise Wrong(f"rank {rank} empties {word} in call {call}, which nobody has taken")
            return {key: value for key, value in memory.items() if key != place}, headers
        place = (peer if what == "send" else rank, slot, row)
        word = memory.get(place)
        if what == "send":
            if word is not None:
                raise Wrong(f"rank {rank} writes over {word} in call {call}")
            return {**memory, place: (call, rank)}, headers
        if word is None:
            return None
        if word != (call, peer):
            raise Wrong(f"rank {rank} takes {word} for (call {call}, rank {peer})")
        if self.protocol.empties != "on taking":
            return memory, headers
        return {key: value for key, value in memory.items() if key != place}, headers

    def explore(self) -> int:
        """Visits every reachable state; how many there are."""
        seen = {self.start()}
        todo = [self.start()]
        while todo:
            state = todo.pop()
            further = False
            for new in self.after(state):
                further = True
                if new not in seen:
                    seen.add(new)
                    todo.append(new)
            if not further:
                calls, _, words, _ = state
                if any(call < len(self.calls) for call in calls):
                    raise Wrong(f"standstill in calls {calls}")
                if words and self.protocol.empties == "on taking":
                    raise Wrong(f"left behind: {words}")
        return len(seen)


# Of two ranks, with one token the second has nothing to send.
TWO_RANKS = list(itertools.product((1, 2, -1), repeat=4))
THREE_RANKS = [(1, 2, 3, 1), (3, 1, 1, 1), (1, 1, 1, 1), (2, 3, 1, 2), (1, -1, 1, 2)]


@pytest.mark.parametrize("calls", TWO_RANKS, ids=str)
def test_two_ranks(calls: tuple[int, ...]) -> None:
    assert Model(2, calls, Protocol()).explore() > 50


@pytest.mark.parametrize("calls", THREE_RANKS, ids=str)
def test_three_ranks(calls: tuple[int, ...]) -> None:
    assert Model(3, calls, Protocol()).explore() > 500


@pytest.mark.parametrize("ranks", [2, 3])
def test_streamed(ranks: int) -> None:
    """As the kernel for many tokens: it waits between its sends, and no circle closes."""
    for calls in ((6, 4, 6, 5), (5, 1, 7, 2)):
        Model(ranks, calls, Protocol(streamed=True)).explore()


def test_three_slots_may_be_emptied_a_call_later() -> None:
    Model(2, (2, 1, 2, -1), Protocol(slots=3, empties="in the next call")).explore()


@pytest.mark.parametrize(
    "protocol",
    [
        Protocol(slots=1),
        Protocol(meets=False),
        Protocol(counted=False),
        Protocol(empties="never"),
        Protocol(empties="in the next call"),
    ],
    ids=str,
)
@pytest.mark.parametrize("ranks", [2, 3])
def test_without_one_of_its_parts_it_is_wrong(protocol: Protocol, ranks: int) -> None:
    def explore_some() -> None:
        for calls in ((2, 2, 2, 2), (1, 1, 1, 1), (1, 2, 1, 2)):
            Model(ranks, calls, protocol).explore()

    with pytest.raises(Wrong):
        explore_some()
