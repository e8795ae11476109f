"""Two processes on two GPUs, of which one dies or makes another call: the other one's call ends.

This file is also what the processes run. They are no :class:`RankPool`'s, which would end the rank
that is left.
"""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import pytest
import torch
import torch.distributed as dist

import moetail.kernels as kernels
from moetail.conformance.cases import Case
from moetail.kernels import BeamAllReduceWorkspace, ExchangeError

GATHER = "beam_moe_finalize_gather_norm_residual_norm"
ALLREDUCE = "beam_finalize_allreduce_norm_residual_norm"
CALLS = ("oneshot", "twoshot", "all-reduce")
DEADLINE = 2.0
# A call ends by its deadline; what comes on top is a process that has to be scheduled.
ENOUGH = DEADLINE + 8.0
# The first process of a machine builds the kernels.
START = 300.0


# --- what a rank does -----------------------------------------------------------------------------


def serve(rank: int, store: str) -> None:
    """Make the calls that come on stdin, such as "oneshot 8", and say on stdout what became of
    them; "launched" comes as soon as the host is through."""
    torch.cuda.set_device(rank)
    dist.init_process_group(
        "nccl",
        store=dist.FileStore(store, 2),
        rank=rank,
        world_size=2,
        device_id=torch.device("cuda", rank),
    )
    workspace = BeamAllReduceWorkspace.create(None, 256, 64, torch.bfloat16)
    assert workspace is not None, BeamAllReduceWorkspace.why_unsupported()
    for kind in CALLS:
        launch(rank, kind, 8, workspace)
        workspace.check()
    workspace.deadline_s = DEADLINE
    print("ready", flush=True)
    for line in sys.stdin:
        kind, tokens = line.split()
        try:
            launch(rank, kind, int(tokens), workspace)
            print("launched", flush=True)
            workspace.check()
            print("returned", flush=True)
        except ExchangeError as error:
            print(f"ExchangeError({error.rank}): {error}", flush=True)


def launch(rank: int, kind: str, tokens: int, workspace: BeamAllReduceWorkspace) -> None:
    case = (
        Case(ALLREDUCE, tokens=tokens, ranks=2)
        if kind == "all-reduce"
        else Case(GATHER, tokens=tokens, ranks=2, strategy=kind)
    )
    arguments: dict[str, Any] = case.arguments(rank, f"cuda:{rank}")
    getattr(kernels, case.operation)(**arguments, workspace=workspace)


# --- the two of them ------------------------------------------------------------------------------


class Rank:
    """A process, and what it says."""

    def __init__(self, rank: int, folder: Path) -> None:
        # As the suite's own ranks have it.
        environment = {"TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NCCL_NVLS_ENABLE": "0"}
        self.errors = folder / f"stderr of rank {rank}"
        with self.errors.open("w", encoding="utf-8") as errors:
            self.process = subprocess.Popen(
                [sys.executable, __file__, str(rank), str(folder / "store")],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env={**os.environ, **environment},
            )
        assert self.process.stdout is not None
        self._lines: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._listen, args=(self.process.stdout,), daemon=True).start()

    def _listen(self, stream: IO[str]) -> None:
        for line in stream:
            self._lines.put(line.strip())
        self._lines.put("(ended)")

    def ask(self, call: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{call}\n")
        self.process.stdin.flush()

    def said(self, within: float) -> str:
        """The next line; the test fails where none comes in time."""
        try:
            line = self._lines.get(timeout=within)
        except queue.Empty:
            line = f"(nothing within {within:g} s)"
        if line.startswith("("):
            pytest.fail(f"{line}\n{self.errors.read_text(encoding='utf-8')[-4000:]}")
        return line

    def kill(self) -> None:
        """As the kernel would, without a word to anybody."""
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(30)


@contextlib.contextmanager
def two_ranks(folder: Path) -> Iterator[list[Rank]]:
    """Both, ready; killed at the end, whatever they wait for."""
    ranks = [Rank(rank, folder) for rank in range(2)]
    try:
        for rank in ranks:
            assert rank.said(START) == "ready"
        yield ranks
    finally:
        for rank in ranks:
            rank.kill()


needs_two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


def assert_lost(rank: Rank, other: int, words: str) -> None:
    """The rank's call ends with an error that names the other rank, and so does its next one."""
    started = time.monotonic()
    assert rank.said(ENOUGH) == "launched"
    said = rank.said(ENOUGH)
    assert said.startswith(f"ExchangeError({other}): rank {other} {words}"), said
    assert time.monotonic() - started < ENOUGH
    rank.ask("oneshot 8")
    again = rank.said(ENOUGH)  # before anything is launched
    assert again.startswith(f"ExchangeError({other}): rank {other} {words}"), again


@needs_two_gpus
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("lost", [0, 1])
def test_a_rank_that_is_killed_between_calls(tmp_path: Path, call: str, lost: int) -> None:
    with two_ranks(tmp_path) as ranks:
        ranks[lost].kill()
        ranks[1 - lost].ask(f"{call} 8")
        assert_lost(ranks[1 - lost], lost, "did not arrive within the deadline")


@needs_two_gpus
@pytest.mark.parametrize("call", CALLS)
def test_a_rank_that_is_killed_while_the_other_waits(tmp_path: Path, call: str) -> None:
    with two_ranks(tmp_path) as ranks:
        ranks[0].ask(f"{call} 8")
        time.sleep(DEADLINE / 4)
        ranks[1].kill()
        assert_lost(ranks[0], 1, "did not arrive within the deadline")


@needs_two_gpus
@pytest.mark.parametrize(
    ("mine", "theirs", "shown"),
    [
        ("oneshot 8", "oneshot 10", ("oneshot gather of 8", "oneshot gather of 10")),
        ("all-reduce 8", "all-reduce 3", ("all-reduce of 8", "all-reduce of 3")),
        ("oneshot 8", "twoshot 8", ("oneshot gather of 8", "twoshot gather of 8")),
        ("oneshot 8", "all-reduce 8", ("oneshot gather of 8", "all-reduce of 8")),
    ],
)
def test_a_rank_that_makes_another_call(
    tmp_path: Path, mine: str, theirs: str, shown: tuple[str, str]
) -> None:
    """Another T, strategy or operation: each rank says what the other one called."""
    with two_ranks(tmp_path) as ranks:
        ranks[0].ask(mine)
        ranks[1].ask(theirs)
        assert_lost(ranks[0], 1, f"called {shown[1]} tokens")
        assert_lost(ranks[1], 0, f"called {shown[0]} tokens")


if __name__ == "__main__":
    try:
        serve(int(sys.argv[1]), sys.argv[2])
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)  # taking NCCL down in order would wait for the rank that is gone
