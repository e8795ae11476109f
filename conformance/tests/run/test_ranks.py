"""Rank processes: what comes back, who is blamed when one fails, and that none is left behind."""

from __future__ import annotations

import contextlib
import ctypes
import os
import pickle
import re
import resource
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from moetail.conformance.run.ranks import PoolError, RankError, RankPool
from moetail.reference import BeamAllReduceWorkspace
from moetail.spec import ContractError, UnfinalizedMoEOutput

# Short enough for a test, long enough for a loaded machine.
GRACE = 1.0
# Told from other people's by its duration.
FORKED = [b"sleep", b"300.0142857"]
# The folder that the ranks import this module from, whatever name pytest gave it.
ROOT = Path(__file__).parents[__name__.count(".")]


# What the ranks run


@dataclass
class Nested:
    name: str
    tensors: dict[str, list[torch.Tensor]]


class Awkward(Exception):
    """Pickles, but does not unpickle."""

    def __init__(self, first: int, second: int) -> None:
        super().__init__(f"{first} and {second}")


@dataclass
class Fatal:
    """Does something where it is unpickled: before the function is called."""

    function: Callable[..., Any]
    argument: Any

    def __reduce__(self) -> Any:
        return self.function, (self.argument,)


def total(group: dist.ProcessGroup, rank: int, value: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = value * 10**rank
    dist.all_reduce(result, group=group)
    return result


def world(group: dist.ProcessGroup, rank: int) -> tuple[int, int, int, int]:
    threads = torch.get_num_threads()
    return dist.get_world_size(group), dist.get_rank(group), dist.get_world_size(), threads


def variables(group: dist.ProcessGroup, rank: int, *names: str) -> list[str | None]:
    return [os.environ.get(name) for name in names]


def echo(group: dist.ProcessGroup, rank: int, value: Any) -> Any:
    return value


def pid(group: dist.ProcessGroup, rank: int) -> int:
    return os.getpid()


def meet(group: dist.ProcessGroup, rank: int, guilty: dict[int, str], seconds: float = 60) -> int:
    """Wait for all ranks, except that the guilty ones do something else."""
    match guilty.get(rank):
        case "raise":
            raise RuntimeError("no more")
        case "refuse":
            raise ContractError("OWN-1", "x", "nothing", "something")
        case "awkward":
            raise Awkward(1, 2)
        case "sleep":
            time.sleep(seconds)
        case "spin":
            while True:
                pass
        case "hold":
            ctypes.PyDLL(None).sleep(int(seconds))  # unlike CDLL, it keeps the interpreter lock
        case "exit":
            os._exit(7)
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "return":
            return rank
        case "leave":
            raise SystemExit(3)
        case "fork":
            # Somebody who must not outlive the rank.
            subprocess.Popen(FORKED)
            raise RuntimeError("no more")
    dist.barrier(group=group)
    return rank


def one_way(group: dist.ProcessGroup, rank: int) -> None:
    """Rank 0 starts a collective that nobody else knows of, and does not wait."""
    if rank == 0:
        dist.broadcast(torch.zeros(1), 0, group=group, async_op=True)


def unsendable(group: dist.ProcessGroup, rank: int) -> Any:
    return lambda: rank


def workspace(group: dist.ProcessGroup, rank: int) -> tuple[int, int]:
    made = BeamAllReduceWorkspace.create(group, 256, 8, torch.bfloat16)
    assert made is not None
    return made.rank, made.world_size


def speak(group: dist.ProcessGroup, rank: int) -> None:
    print(f"rank {rank} speaks")
    print(f"rank {rank} complains", file=sys.stderr)


# Processes


def descendants(root: int) -> set[int]:
    """Every process below ``root``, the dead but not yet reaped included."""
    children: dict[int, list[int]] = {}
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = status.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        children.setdefault(int(fields[1]), []).append(int(status.parent.name))
    found: set[int] = set()
    todo = [root]
    while todo:
        below = children.get(todo.pop(), [])
        found.update(below)
        todo.extend(below)
    return found


def alive(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def parent(process: int) -> int:
    return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])


def sleepers() -> set[int]:
    """What "fork" left, wherever it is now."""
    found = set()
    for command in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if command.read_bytes() == b"\0".join([*FORKED, b""]):
                found.add(int(command.parent.name))
        except OSError:
            continue
    return found


def until(condition: Callable[[], bool], seconds: float = 10.0) -> bool:
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True


needs_proc = pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="needs /proc")


@pytest.fixture(scope="module", autouse=True)
def importable() -> Iterator[None]:
    """Let the ranks import this module, once for all of them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [*sys.path, str(ROOT)])
        patch.setattr("moetail.conformance.run.ranks.pool.PRELOAD", (__name__,))
        yield


@pytest.fixture(scope="module")
def pool(importable: None) -> Iterator[RankPool]:
    with RankPool(8, timeout=30.0, grace=GRACE) as made:
        yield made


def works(pool: RankPool) -> bool:
    outcomes = pool.run(3, total, torch.ones(2), operation="sum")
    return [outcome.value.tolist() for outcome in outcomes] == [[111.0, 111.0]] * 3


# What comes back


@pytest.mark.parametrize("count", [1, 2, 3, 4, 8])
def test_sum_over_ranks(pool: RankPool, count: int) -> None:
    for _ in range(3):
        outcomes = pool.run(count, total, torch.ones(3, dtype=torch.int64), operation="sum")
        assert [outcome.rank for outcome in outcomes] == list(range(count))
        assert all(outcome.error is None for outcome in outcomes)
        assert all(outcome.value.tolist() == [int("1" * count)] * 3 for outcome in outcomes)


@pytest.mark.parametrize("count", [1, 3, 8])
def test_group_has_exactly_the_ranks(pool: RankPool, count: int) -> None:
    outcomes = pool.run(count, world, operation="world")
    assert [outcome.value for outcome in outcomes] == [(count, r, 8, 1) for r in range(count)]


def test_reference_runs_in_a_group(pool: RankPool) -> None:
    outcomes = pool.run(3, workspace, operation="create")
    assert [outcome.value for outcome in outcomes] == [(0, 3), (1, 3), (2, 3)]


def test_every_bf16_pattern_survives(pool: RankPool) -> None:
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int16)
    (outcome,) = pool.run(1, echo, bits.view(torch.bfloat16), operation="echo")
    assert outcome.value.dtype is torch.bfloat16
    assert torch.equal(outcome.value.view(torch.int16), bits)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor(-0.0),
        torch.tensor([float("nan"), float("-inf"), 5e-324], dtype=torch.float64),
        torch.empty(0, 7),
        torch.tensor([True, False]),
        torch.tensor([1 + 2j]).conj(),
        torch.arange(4, dtype=torch.float32).to(torch.float8_e4m3fn),
        torch.ones(3, requires_grad=True),
    ],
    ids=["scalar", "float64", "empty", "bool", "conjugate", "float8", "leaf"],
)
def test_tensors_of_any_kind(pool: RankPool, tensor: torch.Tensor) -> None:
    (outcome,) = pool.run(1, echo, tensor, operation="echo")
    value = outcome.value
    assert (value.dtype, value.shape, value.requires_grad) == (tensor.dtype, tensor.shape, False)
    expected = tensor.detach().resolve_conj().reshape(-1).view(torch.uint8)
    assert torch.equal(value.reshape(-1).view(torch.uint8), expected)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(12.0).reshape(3, 4).T,
        torch.arange(12.0).reshape(3, 4)[:, 1:3],
        torch.arange(12.0)[3::4],
        torch.ones(1).expand(1 << 40, 2),
        torch.empty(5, 4, device="meta")[:, :3],
    ],
    ids=["transposed", "gaps", "steps", "expanded", "meta"],
)
def test_strides_survive(pool: RankPool, tensor: torch.Tensor) -> None:
    (outcome,) = pool.run(1, echo, tensor, operation="echo")
    assert outcome.value.stride() == tensor.stride()
    assert outcome.value.shape == tensor.shape
    assert outcome.value.device == tensor.device
    if not tensor.is_meta and tensor.numel() < 100:
        assert torch.equal(outcome.value, tensor)


def test_nested_values(pool: RankPool) -> None:
    inner = torch.tensor([1.0, -0.0], dtype=torch.bfloat16)
    unfinalized = UnfinalizedMoEOutput(inner, inner * 2, torch.tensor([[0, -1]]), True)
    sent = (Nested("x", {"a": [inner, inner]}), [unfinalized, None], {"k": (1, b"2")})
    for outcome in pool.run(2, echo, sent, operation="echo"):
        nested, (back, nothing), rest = outcome.value
        assert isinstance(nested, Nested)
        assert torch.equal(nested.tensors["a"][1].view(torch.int16), inner.view(torch.int16))
        assert isinstance(back, UnfinalizedMoEOutput)
        assert back.route_major
        assert torch.equal(back.expert_weights, inner * 2)
        assert (nothing, rest) == (None, {"k": (1, b"2")})
        back.expert_weights.fill_(0)  # writable, and nobody else's


def test_large_tensor(pool: RankPool) -> None:
    tensor = torch.arange(1 << 22, dtype=torch.int32)
    assert all(torch.equal(o.value, tensor) for o in pool.run(2, echo, tensor, operation="echo"))


def test_output_passes_through(capfd: pytest.CaptureFixture[str]) -> None:
    with RankPool(2, timeout=30.0) as pool:
        pool.run(2, speak, operation="speak")
    out, err = capfd.readouterr()
    # Two ranks may write between each other's text and its line's end.
    assert sorted(re.findall(r"rank \d speaks", out)) == ["rank 0 speaks", "rank 1 speaks"]
    assert "rank 1 complains" in err


# Failures


def test_refusal_on_every_rank_is_an_outcome(pool: RankPool) -> None:
    pool.run(4, pid, operation="pid")
    before = pool.pids
    outcomes = pool.run(4, meet, dict.fromkeys(range(4), "refuse"), operation="op")
    for outcome in outcomes:
        assert outcome.value is None
        error = outcome.error
        assert error is not None
        assert error.type == "ContractError"
        assert "[OWN-1] x" in error.message
        assert isinstance(error.exception, ContractError)
        assert (error.exception.rule, error.exception.argument) == ("OWN-1", "x")
        assert "in meet" in error.traceback
        assert "rank.py" not in error.traceback
    assert pool.pids == before  # a refusal costs no restart


def test_exception_that_does_not_unpickle(pool: RankPool) -> None:
    (outcome,) = pool.run(1, meet, {0: "awkward"}, operation="op")
    assert outcome.error is not None
    assert (outcome.error.type, outcome.error.message) == ("Awkward", "1 and 2")
    assert outcome.error.exception is None


@pytest.mark.parametrize(("function", "kind"), [(unsendable, ""), (meet, "SystemExit")])
def test_whatever_is_raised_is_an_outcome(
    pool: RankPool, function: Callable[..., Any], kind: str
) -> None:
    args = ({0: "leave"},) if function is meet else ()
    (outcome,) = pool.run(1, function, *args, operation="op")
    assert outcome.error is not None
    assert kind in outcome.error.type
    assert works(pool)


def test_some_raise_and_the_others_return(pool: RankPool) -> None:
    pool.run(1, pid, operation="pid")
    before = pool.pids
    outcomes = pool.run(3, meet, {0: "return", 1: "raise", 2: "return"}, operation="op")
    assert [outcome.value for outcome in outcomes] == [0, None, 2]
    assert outcomes[1].error is not None
    assert outcomes[1].error.message == "no more"
    assert not any(alive(process) for process in before)
    assert works(pool)


def test_half_done_collective_restarts_the_pool(pool: RankPool) -> None:
    pool.run(2, pid, operation="pid")
    before = pool.pids
    assert all(o.error is None for o in pool.run(2, one_way, operation="one way"))
    assert works(pool)
    assert not set(pool.pids) & set(before)


@needs_proc
@pytest.mark.parametrize(
    ("guilty", "blamed", "message", "limits"),
    [
        ({2: "raise"}, (2,), "rank 2 raised RuntimeError: no more in op (4 ranks)", (GRACE, 10)),
        (
            {1: "raise", 3: "refuse"},
            (1, 3),
            "rank 1 raised RuntimeError: no more; rank 3 raised ContractError: [OWN-1] x: found "
            "nothing; allowed: something in op (4 ranks)",
            (GRACE, 10),
        ),
        ({0: "fork"}, (0,), "rank 0 raised RuntimeError: no more in op (4 ranks)", (GRACE, 10)),
        (
            {3: "sleep"},
            (3,),
            "rank 3 did not arrive in op within 2 s; ranks 0, 1, 2 wait for it",
            (2, 10),
        ),
        (
            {0: "spin", 2: "sleep"},
            (0, 2),
            "ranks 0, 2 did not arrive in op within 2 s; ranks 1, 3 wait for them",
            (2, 10),
        ),
        (
            {0: "return"},
            (0,),
            "rank 0 did not arrive in op within 2 s (rank 0 had returned); "
            "ranks 1, 2, 3 wait for it",
            (2, 10),
        ),
        (
            dict.fromkeys(range(4), "sleep"),
            (0, 1, 2, 3),
            "ranks 0, 1, 2, 3 did not finish op within 2 s",
            (2, 10),
        ),
        ({1: "exit"}, (1,), "rank 1 died (exit code 7) in op (4 ranks)", (0, 10)),
        ({1: "kill"}, (1,), "rank 1 died (exit code -9) in op (4 ranks)", (0, 10)),
        (
            {0: "kill", 3: "exit"},
            (0, 3),
            "rank 0 died (exit code -9); rank 3 died (exit code 7) in op (4 ranks)",
            (0, 10),
        ),
    ],
    ids=[
        "raises",
        "two raise",
        "raises, leaving a process",
        "never arrives",
        "two never arrive",
        "returns early",
        "nobody finishes",
        "exits",
        "is killed",
        "two die",
    ],
)
def test_others_left_waiting(
    pool: RankPool,
    guilty: dict[int, str],
    blamed: tuple[int, ...],
    message: str,
    limits: tuple[float, float],
) -> None:
    pool.run(4, pid, operation="pid")
    before = pool.pids
    started = time.monotonic()
    with pytest.raises(RankError) as caught:
        pool.run(4, meet, guilty, operation="op", timeout=2.0)
    assert limits[0] <= time.monotonic() - started < limits[1]
    assert str(caught.value) == message
    assert caught.value.ranks == blamed
    assert caught.value.reason
    assert pool.pids == ()
    assert not any(alive(process) for process in before)
    # What a rank has started ends with it.
    assert until(lambda: sleepers() == set())
    assert works(pool)


def test_error_says_where_the_ranks_are(pool: RankPool) -> None:
    with pytest.raises(RankError, match="rank 1 did not arrive") as caught:
        pool.run(2, meet, {1: "sleep"}, operation="op", timeout=1.0)
    first, second = caught.value.details.split("rank 1:")
    assert "dist.barrier" in first
    assert "time.sleep" in second
    copy = pickle.loads(pickle.dumps(caught.value))
    assert (str(copy), vars(copy)) == (str(caught.value), vars(caught.value))


def test_rank_that_holds_the_interpreter(pool: RankPool) -> None:
    with pytest.raises(RankError, match=r"rank 1 did not .* ranks 0, 2 wait") as caught:
        pool.run(3, meet, {1: "hold"}, operation="op", timeout=1.0)
    assert "rank 1:\n  gives no sign of life" in caught.value.details
    assert works(pool)


@needs_proc
def test_rank_that_dies_between_calls(pool: RankPool) -> None:
    pool.run(2, pid, operation="before")
    os.kill(pool.pids[5], signal.SIGKILL)
    # Its parent learns of its end when its last thread has ended.
    threads = Path(f"/proc/{pool.pids[5]}/task")
    assert until(lambda: not alive(pool.pids[5]) and len(list(threads.iterdir())) == 1)
    with pytest.warns(RuntimeWarning, match=r"rank 5 died \(exit code -9\) after before"):
        assert works(pool)


def test_server_that_dies(pool: RankPool) -> None:
    pool.run(2, pid, operation="before")
    folder = Path(pool._folder)
    assert folder.is_dir()
    before = pool.pids
    (server,) = {parent(rank) for rank in before}
    os.kill(server, signal.SIGKILL)
    assert until(lambda: not any(alive(process) for process in before))
    with pytest.warns(RuntimeWarning, match=r"server of the ranks died \(exit code -9\)"):
        assert works(pool)
    assert not folder.exists()


# The machine, and not what ran


def kill_parent(group: dist.ProcessGroup, rank: int) -> None:
    """What runs out of memory first may well be the server."""
    if rank == 0:
        os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(60)


def test_server_that_dies_during_a_call(pool: RankPool) -> None:
    pool.run(2, pid, operation="before")
    before = pool.pids
    message = r"^the server of the ranks died \(exit code -9\) during op$"
    with pytest.raises(PoolError, match=message):
        pool.run(2, kill_parent, operation="op")
    assert until(lambda: not any(alive(process) for process in before))
    assert works(pool)


def test_rank_that_dies_before_its_function_runs(pool: RankPool) -> None:
    message = r"^ranks 0, 1 died \(exit code 9\) in op \(2 ranks\), before it began$"
    with pytest.raises(PoolError, match=message):
        pool.run(2, echo, Fatal(os._exit, 9), operation="op")
    assert pool.pids == ()
    assert works(pool)


def test_rank_that_hangs_before_its_function_runs(pool: RankPool) -> None:
    with pytest.raises(PoolError, match=r"^ranks 0, 1 did not begin op within 1 s$"):
        pool.run(2, echo, Fatal(time.sleep, 60), operation="op", timeout=1.0)
    assert works(pool)


@pytest.mark.skipif(torch.cuda.device_count() > 0, reason="has a GPU")
def test_more_ranks_than_gpus(importable: None) -> None:
    message = "the rank pool did not start: rank [01]: 2 ranks need as many GPUs, not 0"
    with RankPool(2, device="cuda") as pool, pytest.raises(PoolError, match=message):
        pool.run(1, pid, operation="op")


@contextlib.contextmanager
def limited(what: int, most: int, process: int = 0) -> Iterator[None]:
    """A process, or this one, gets no more of a resource."""
    before = resource.prlimit(process, what)
    resource.prlimit(process, what, (most, before[1]))
    try:
        yield
    finally:
        resource.prlimit(process, what, before)


needs_prlimit = pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")


@needs_prlimit
def test_no_more_files_for_the_server(importable: None) -> None:
    with RankPool(2) as pool:
        with (
            limited(resource.RLIMIT_NOFILE, 4),
            pytest.raises(PoolError, match=r"^the rank pool did not start: .* open files"),
        ):
            pool.run(1, pid, operation="op")
        assert pool.run(1, pid, operation="op")


@needs_prlimit
def test_no_more_files_for_the_ranks(pool: RankPool) -> None:
    pool.run(1, pid, operation="pid")
    (server,) = {parent(rank) for rank in pool.pids}
    with pytest.raises(RankError):
        pool.run(1, meet, {0: "kill"}, operation="op")
    with (
        limited(resource.RLIMIT_NOFILE, 10, server),
        pytest.raises(PoolError, match=r"^the rank pool did not start: .* open files"),
    ):
        pool.run(1, pid, operation="op")
    assert works(pool)


@needs_prlimit
def test_no_memory_for_the_server(importable: None) -> None:
    with (
        RankPool(2) as pool,
        limited(resource.RLIMIT_AS, 1 << 28),
        pytest.raises(PoolError, match=r"^the server of the ranks died .* during op$"),
    ):
        pool.run(1, pid, operation="op")


@pytest.mark.parametrize("ranks_", [0, 9])
def test_impossible_number_of_ranks(pool: RankPool, ranks_: int) -> None:
    with pytest.raises(ValueError, match=f"{ranks_} ranks, but the pool has 1 to 8"):
        pool.run(ranks_, pid, operation="op")


def test_unsendable_arguments_leave_the_pool_alone(pool: RankPool) -> None:
    pool.run(1, pid, operation="pid")
    before = pool.pids
    with pytest.raises((pickle.PicklingError, AttributeError)):
        pool.run(1, echo, lambda: 0, operation="op")
    assert works(pool)
    assert pool.pids == before


# Nothing is left behind


@needs_proc
def test_many_calls_leak_nothing(pool: RankPool) -> None:
    def count() -> list[int]:
        return [len(os.listdir(f"/proc/{p}/fd")) for p in (os.getpid(), *pool.pids)]

    tensors = [torch.ones(8, dtype=torch.bfloat16)] * 4
    pool.run(4, echo, tensors, operation="echo")
    pool.run(2, total, tensors[0], operation="sum")
    before = count()
    for k in range(500):
        outcomes = pool.run(4 if k % 2 else 2, echo, tensors, operation="echo")
        assert len(outcomes[0].value) == 4
    assert count() == before


@needs_proc
def test_restarts_leak_nothing(pool: RankPool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "grace", 0.1)
    counts = set()
    for _ in range(4):
        with pytest.raises(RankError):
            pool.run(2, meet, {0: "raise"}, operation="op")
        counts.add(len(os.listdir("/proc/self/fd")))
    assert len(counts) == 1


@needs_proc
def test_close_ends_every_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    others = descendants(os.getpid())
    with RankPool(3, timeout=30.0) as pool:
        assert works(pool)
        assert len(descendants(os.getpid()) - others) == 4
        assert len(list(tmp_path.iterdir())) == 1
    assert descendants(os.getpid()) - others == set()
    assert list(tmp_path.iterdir()) == []
    assert pool.pids == ()
    pool.close()
    with pytest.raises(RuntimeError, match="closed"):
        pool.run(1, pid, operation="op")


def test_close_from_another_thread_ends_a_call() -> None:
    pool = RankPool(2, timeout=60.0)
    pool.run(2, pid, operation="pid")
    closer = threading.Timer(0.3, pool.close)
    closer.start()
    with pytest.raises(RuntimeError, match="closed during op"):
        pool.run(2, meet, {0: "sleep"}, operation="op")
    closer.join(10)
    assert not closer.is_alive()


def test_threads_share_a_pool(pool: RankPool) -> None:
    seen: list[bool] = []
    threads = [
        threading.Thread(target=lambda: seen.extend(works(pool) for _ in range(5)))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert seen == [True] * 20


PARENT = """
import os, signal, sys, threading, time
from moetail.conformance.run.ranks import pool as pools

signal.signal(signal.SIGINT, signal.default_int_handler)
name, root, end = sys.argv[1:]
sys.path.append(root)
module = __import__(name, fromlist=["meet"])
if end != "exit":  # once with everything that a pool imports, otherwise just what is needed
    pools.PRELOAD = (name,)
pool = pools.RankPool(3, timeout=60.0)
assert module.works(pool)
pids = pool.pids
print(module.parent(pids[0]), *pids, flush=True)
if end == "fork" and os.fork() == 0:
    # The copy must not keep the ranks alive, and can have ranks of its own.
    time.sleep(1.0)
    assert not any(module.alive(process) for process in pids)
    assert pool.pids == () and module.works(pool)
    print("copy works", flush=True)
elif end == "fork":
    os.kill(os.getpid(), signal.SIGKILL)
elif end == "exit":
    sys.exit(0)
else:
    pool.run(3, module.meet, {0: "sleep", 1: "spin"}, operation="op")
"""


ENDS = ("exit", "SIGKILL", "SIGINT", "fork")


@pytest.fixture(scope="module")
def parents(importable: None) -> Iterator[dict[str, subprocess.Popen[str]]]:
    """All at once, since what takes time is importing torch."""
    made = {
        end: subprocess.Popen(
            [sys.executable, "-c", PARENT, __name__, str(ROOT), end],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        for end in ENDS
    }
    yield made
    for process in made.values():
        process.kill()


@needs_proc
@pytest.mark.parametrize("end", ENDS)
def test_ranks_end_with_their_parent(parents: dict[str, subprocess.Popen[str]], end: str) -> None:
    with parents[end] as parent_:
        assert parent_.stdout is not None
        processes = [int(word) for word in parent_.stdout.readline().split()]
        assert len(processes) == 4
        if end.startswith("SIG"):
            time.sleep(0.5)
            assert all(alive(process) for process in processes)
            parent_.send_signal(signal.Signals[end])
        parent_.wait(20)
        assert until(lambda: not any(alive(process) for process in processes))
        if end == "fork":
            assert parent_.stdout.readline() == "copy works\n"


def test_variables_for_the_ranks(importable: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """They find the pool's, unless the user has set others."""
    monkeypatch.setenv("MOETAIL_SET", "by the user")
    given = {"MOETAIL_SET": "by the pool", "MOETAIL_UNSET": "by the pool"}
    with RankPool(1, environment=given) as made:
        (outcome,) = made.run(1, variables, *given, operation="op")
    assert outcome.value == ["by the user", "by the pool"]
    assert "MOETAIL_UNSET" not in os.environ


def test_pools_side_by_side(pool: RankPool) -> None:
    with RankPool(3, timeout=30.0) as other:
        for _ in range(3):
            assert works(other)
            assert works(pool)
        with pytest.raises(RankError):
            other.run(2, meet, {0: "kill"}, operation="op")
        assert works(pool)
        assert works(other)


@needs_proc
def test_the_workers_of_a_killed_command_end_with_it() -> None:
    """Those of ``moetail mutants``, and their ranks."""
    words = ["mutants", "reversed-sum", "--profile", "full", "--ranks", "1,2", "--workers", "1"]
    code = "import sys; from moetail.conformance.cli import main; sys.exit(main())"
    with subprocess.Popen(
        [sys.executable, "-c", code, *words],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    ) as command:
        try:
            # Multiprocessing's tracker, the worker, the server of its ranks, and the ranks.
            assert until(lambda: len(descendants(command.pid)) >= 5, 120.0)
            processes = descendants(command.pid)
        finally:
            command.kill()
    assert until(lambda: not any(alive(process) for process in processes))
