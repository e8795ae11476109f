"""Dumps of every operation, changed at random: what is left is judged as before, or told.

``MOETAIL_FUZZ=N`` tries N changes of each kind, anew each time; without it they are few, and always
the same.
"""

from __future__ import annotations

import os
import resource
import time
import types
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from conformance.tests.dumps.calls import LOCAL, case, compact, parts, saved, sealed
from moetail.conformance.cases import Case
from moetail.conformance.diagnosis import simulate
from moetail.conformance.dumps import DumpError, capture, judge_files
from moetail.reference import BeamAllReduceWorkspace, Reference
from moetail.spec.rules import ALLREDUCE, GATHER

TRIED = int(os.environ.get("MOETAIL_FUZZ", "0"))
MEMORY = 256 << 20  # bytes that judging may take
SECONDS = 5.0  # of the processor


@dataclass
class Good:
    """A dump that can be judged, with those of the other ranks.

    Attributes:
        path: where changed bytes are put to be judged.
        whole: its bytes.
        others: the files of the other ranks.
        verdict: of all of them.
    """

    path: Path
    whole: bytes = field(repr=False)
    others: list[Path]
    verdict: list[tuple[str, str, int]]

    def judge(self) -> list[tuple[str, str, int]]:
        results = judge_files([self.path, *self.others])
        return [(trial.rule, trial.status, trial.judged) for trial in results.trials]


def _ranks(folder: Path, name: str) -> list[Path]:
    one = Case(name, tokens=3, ranks=2, top_k=2, hidden=256, next="affine")
    calls = [one.arguments(rank) for rank in range(one.ranks)]
    paths = []
    for rank, result in enumerate(simulate(Reference, name, calls)):
        workspace = BeamAllReduceWorkspace(one.ranks, rank, one.hidden, one.tokens, None)  # type: ignore[arg-type]
        owner = types.SimpleNamespace(**{name: lambda result=result, **given: result})
        with capture(folder, owner) as made:
            getattr(owner, name)(**calls[rank], workspace=workspace)
        paths += made.files
    return paths


class Twice(Reference):
    def finalize_moe_output(self, x: Any) -> Tensor:
        return super().finalize_moe_output(x) * 2


@pytest.fixture(scope="module")
def goods(tmp_path_factory: pytest.TempPathFactory) -> list[Good]:
    folder = tmp_path_factory.mktemp("fuzz")
    groups = [[saved(folder, Reference(), case(name))] for name in LOCAL]
    groups += [_ranks(folder, GATHER), _ranks(folder, ALLREDUCE)]
    # One without tokens, one of some tokens that violates, and one that raises.
    groups.append([saved(folder, Reference(), case("boundary").replace(tokens=0))])
    groups.append([saved(folder, Twice(), case("permuted"), tokens=[1, 3])])
    owner = types.SimpleNamespace(beam_norm_residual_norm=lambda **given: 1 // 0)
    with capture(folder, owner) as captured, suppress(ZeroDivisionError):
        owner.beam_norm_residual_norm(**case("boundary").arguments())
    groups.append(captured.files)
    made = []
    for paths in groups:
        good = Good(folder / "changed", paths[0].read_bytes(), paths[1:], [])
        good.path.write_bytes(good.whole)
        good.verdict = good.judge()
        made.append(good)
    return made


@contextmanager
def bounded() -> Iterator[None]:
    """What is in it may take so much memory and time, and no more."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + MEMORY, hard))
    started = time.process_time()
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
    assert time.process_time() - started < SECONDS


def outcome(good: Good, whole: bytes) -> list[tuple[str, str, int]] | None:
    """The verdict on a changed dump; None where it is told that there is none."""
    good.path.write_bytes(whole)
    with bounded():
        try:
            return good.judge()
        except DumpError as error:
            said = str(error)
    assert said.isprintable()
    assert len(said) < 2000
    assert any(str(path) in said for path in (good.path, *good.others))
    assert "alloc" not in said, "found by running out of memory, not by looking"
    return None


def tried(function: Callable[..., None]) -> Callable[..., None]:
    return settings(
        max_examples=TRIED or 60,
        derandomize=not TRIED,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )(function)


# --- bytes ----------------------------------------------------------------------------------------


@st.composite
def changed_bytes(draw: st.DrawFn, whole: bytes, other: bytes) -> bytes:
    """Some bytes flipped, cut out, put in, repeated, or taken from another dump."""
    end = 8 + int.from_bytes(whole[:8], "little")
    made = bytearray(whole)
    for _ in range(draw(st.integers(1, 3))):
        # As often in the header, which is small, as in the rest.
        most = draw(st.sampled_from([8, end, len(whole)]))
        place = draw(st.integers(0, max(0, min(most, len(made)) - 1)))
        size = draw(st.sampled_from([1, 1, 2, 7, 64, 1000]))
        kind = draw(st.sampled_from(["flip", "set", "cut", "insert", "repeat", "splice", "end"]))
        if kind == "flip" and made:
            made[place] ^= 1 << draw(st.integers(0, 7))
        elif kind == "set":
            made[place : place + size] = draw(st.binary(min_size=size, max_size=size))
        elif kind == "cut":
            del made[place : place + size]
        elif kind == "insert":
            made[place:place] = draw(st.binary(max_size=size))
        elif kind == "repeat":
            made[place:place] = made[place : place + size]
        elif kind == "splice":
            made[place : place + size] = other[place : place + size]
        elif kind == "end":
            del made[place:]
    return bytes(made)


@tried
@given(data=st.data())
def test_changed_bytes(goods: list[Good], data: st.DataObject) -> None:
    good, other = data.draw(st.sampled_from(goods)), data.draw(st.sampled_from(goods))
    whole = data.draw(changed_bytes(good.whole, other.whole))
    assert outcome(good, whole) == (good.verdict if whole == good.whole else None)


@tried
@given(data=st.data())
def test_changed_bytes_under_a_right_checksum(goods: list[Good], data: st.DataObject) -> None:
    good, other = data.draw(st.sampled_from(goods)), data.draw(st.sampled_from(goods))
    whole = data.draw(changed_bytes(good.whole, other.whole))
    end = 8 + int.from_bytes(whole[:8].ljust(8, b"\0"), "little")
    outcome(good, sealed(whole[8:end], whole[end:]))


# --- metadata -------------------------------------------------------------------------------------

_NESTED = "a place for many brackets"
HOSTILE: list[Any] = [
    *(None, True, False, 0, 1, -1, 2, 5, 255, 256, 8192, 2**31 - 1, 2**31, 3 * 10**8, 2**40),
    *(2**62, 2**63 - 1, 2**63, 2**64, 10**400, 0.0, -0.0, 1.5, 1e308, float("nan"), float("inf")),
    *("", "x", "\ud800", "\x1b[31m", "\u202e", "\0", "é", "a" * 70_000, _NESTED),
    *([], {}, [[]], [0], [1, 2], [None], {"": None}, {"a": {"a": []}}, list(range(1000))),
    *("BF16", "F16", "F32", "I32", "I64", "U8", "BOOL", "F8_E4M3", "F4", "C64", "F64"),
    *("float32", "bfloat16", "nn", "residual", "x", "result", "output", "x.routed", "__metadata__"),
    *("0x1.8p+1", "inf", "nan", "0x1p99999", "list", "tuple", "unfinalized", "moe_output"),
    {"kind": "empty", "shape": [10**6, 10**6], "dtype": "bfloat16"},
    {"kind": "empty", "shape": [0, 2**40], "dtype": "bfloat16"},
    {"kind": "empty", "shape": [5, 256], "dtype": "bfloat16"},
    {"kind": "view", "of": "residual", "shape": [256, 5]},
    {"kind": "tensor", "name": "residual", "strides": [0, 1]},
    {"kind": "tensor", "name": "residual", "strides": [1, 5]},
    {"kind": "tensor", "name": "residual", "strides": [10**7, 1]},
    {"kind": "float", "value": "inf"},
    {"kind": "float", "value": "-0x1.0p-1074"},
    {"kind": "items", "of": "tuple", "items": [1, {"kind": "float", "value": "nan"}]},
]


def _places(tree: Any) -> Iterator[tuple[Any, Any]]:
    """Every (container, key) in JSON."""
    keys = tree if isinstance(tree, dict) else range(len(tree)) if isinstance(tree, list) else ()
    for key in keys:
        yield tree, key
        yield from _places(tree[key])


def _change(draw: st.DrawFn, tree: Any) -> None:
    """One change of JSON in its place."""
    places = list(_places(tree))
    if not places:
        return
    holder, key = draw(st.sampled_from(places))
    kind = draw(st.sampled_from(["put", "put", "put", "drop", "copy", "add", "nearby", "shape"]))
    old, hostile = holder[key], deepcopy(draw(st.sampled_from(HOSTILE)))
    if kind == "put":
        holder[key] = hostile
    elif kind == "drop":
        del holder[key]
    elif kind == "copy":
        other, name = draw(st.sampled_from(places))
        if name in other if isinstance(other, dict) else name < len(other):
            holder[key] = deepcopy(other[name])
    elif kind == "add" and isinstance(holder, dict):
        name = draw(st.sampled_from(["new", "y", "\x1b[31m", "", "post_weight", "workspace"]))
        holder[name] = hostile
    elif kind == "add":
        holder.insert(key, hostile)
    elif kind == "nearby" and isinstance(old, int):
        holder[key] = draw(st.sampled_from([old + 1, old - 1, 2 * old, old // 2, -old]))
    elif kind == "shape" and isinstance(old, list) and all(isinstance(one, int) for one in old):
        # As many elements in another shape.
        holder[key] = draw(st.sampled_from([old[::-1], [*old, 1], [1, *old], old[1:] + old[:1]]))


def _text(draw: st.DrawFn, tree: Any) -> str:
    text = compact(tree).replace(
        f'"{_NESTED}"', draw(st.sampled_from(["[" * 5000, '{"a":' * 5000]))
    )
    if draw(st.integers(0, 9)) == 0:
        names = [key for holder, key in _places(tree) if isinstance(holder, dict) and key.isalpha()]
        if names:
            name = draw(st.sampled_from(names))
            text = text.replace(f'"{name}":', f'"{name}":null,"{name}":', 1)
    return text


@st.composite
def changed_metadata(draw: st.DrawFn, whole: bytes) -> bytes:
    """The header or the call's own metadata with some values changed, and a right checksum."""
    header, content, data = parts(whole)
    if draw(st.booleans()):
        for _ in range(draw(st.integers(1, 3))):
            _change(draw, content)
        header["__metadata__"]["moetail"] = _text(draw, content)
        return sealed(compact(header), data)
    for _ in range(draw(st.integers(1, 2))):
        _change(draw, header)
    return sealed(_text(draw, header), data)


@tried
@given(data=st.data())
def test_changed_metadata_under_a_right_checksum(goods: list[Good], data: st.DataObject) -> None:
    good = data.draw(st.sampled_from(goods))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        outcome(good, data.draw(changed_metadata(good.whole)))
