"""Files of dumps: they appear whole, and whatever happened to one later is told in one line."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
import time
import types
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from conformance.tests.dumps.calls import LOCAL, case, compact, parts, rewritten, saved, sealed
from moetail.conformance.cases import Case
from moetail.conformance.cli import main
from moetail.conformance.dumps import DumpError, capture, judge_files, load_dump, write_dump
from moetail.conformance.dumps.content import Content, Stored
from moetail.reference import Reference
from moetail.spec.rules import ALLREDUCE


def told(path: Path) -> str:
    """What is said of a file that cannot be judged: one line that begins with its name."""
    with pytest.raises(DumpError) as error:
        judge_files([path])
    line = str(error.value)
    assert line.startswith(f"{path}: found ")
    assert "; allowed: " in line
    assert line.isprintable()
    assert len(line) < len(str(path)) + 1000
    return line


@pytest.fixture
def good(tmp_path: Path) -> Path:
    return saved(tmp_path, Reference(), case("fused"))


# --- writing --------------------------------------------------------------------------------------


def test_a_file_can_be_read_by_whom_the_umask_lets(good: Path) -> None:
    other = good.with_name("other")
    other.touch()
    assert good.stat().st_mode == other.stat().st_mode


def _written(folder: Path, number: int) -> list[Path]:
    """Dumps that are all to have the same name, with another result each."""
    return [
        write_dump(
            folder / "same",
            Content(
                operation="beam_norm_residual_norm",
                function=f"{number} {part}",
                call=0,
                rank=0,
                world_size=1,
                num_tokens=1,
                tokens=None,
                arguments={"x": Stored("x")},
                environment={},
            ),
            {"x": torch.full((1, 64), number + part / 16)},
        )
        for part in range(8)
    ]


def test_no_writer_overwrites_anothers_file(tmp_path: Path) -> None:
    process = os.fork()
    if process == 0:
        try:
            _written(tmp_path, 9)
        finally:
            os._exit(0)
    made: list[Path] = []
    threads = [
        threading.Thread(target=lambda i=i: made.extend(_written(tmp_path, i))) for i in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    os.waitpid(process, 0)
    assert len(set(made)) == len(made) == 32
    names = {parts(path.read_bytes())[1]["function"] for path in tmp_path.iterdir()}
    assert names == {f"{number} {part}" for number in (0, 1, 2, 3, 9) for part in range(8)}


# --- bytes that are not those that were written ---------------------------------------------------


@pytest.mark.parametrize("name", LOCAL)
def test_a_flipped_bit_is_told_wherever_it_is(tmp_path: Path, name: str) -> None:
    path = saved(tmp_path, Reference(), case(name))
    whole = path.read_bytes()
    header = 8 + int.from_bytes(whole[:8], "little")
    # All of the header, where names, dtypes, shapes and strides are, and some of the tensors.
    places = [*range(0, header, 7), header, (header + len(whole)) // 2, len(whole) - 1]
    for place in places:
        damaged = bytearray(whole)
        damaged[place] ^= 1 << place % 8
        path.write_bytes(damaged)
        told(path)


@pytest.mark.parametrize(
    "change",
    [
        lambda header, data: header["residual"].update(dtype="F16"),
        lambda header, data: header["residual"].update(shape=header["residual"]["shape"][::-1]),
        lambda header, data: header.update(other=header.pop("residual")),
        lambda header, data: header.update(
            {"residual": header["next_weight"], "next_weight": header["residual"]}
        ),
        lambda header, data: header["__metadata__"].update(
            moetail=header["__metadata__"]["moetail"].replace('"rank":0', '"rank":00')
        ),
    ],
    ids=["dtype", "shape", "name", "names", "metadata"],
)
def test_the_checksum_is_of_dtypes_shapes_names_and_metadata(good: Path, change: Any) -> None:
    header, _, data = parts(good.read_bytes())
    change(header, data)
    text = compact(header).encode()
    good.write_bytes(len(text).to_bytes(8, "little") + text + data)
    assert "damaged content (checksum " in told(good)


@pytest.mark.parametrize("share", [0.0, 0.001, 0.2, 0.9, 0.9999])
def test_a_truncated_file_is_told(good: Path, share: float) -> None:
    whole = good.read_bytes()
    good.write_bytes(whole[: int(share * len(whole))])
    assert any(word in told(good) for word in ("damaged content", "ends within its header"))


def test_an_older_format_is_told(good: Path) -> None:
    """As it was written in format 1: the metadata's own format, no checksum of the whole."""
    content = parts(good.read_bytes())[1]
    safetensors.torch.save_file(
        {"x": torch.zeros(3)}, good, {"moetail": json.dumps({**content, "format": 1})}
    )
    assert "format 1; allowed: format 2; capture the call with this version" in told(good)
    safetensors.torch.save_file({"x": torch.zeros(3)}, good, {"moetail": compact(content)})
    assert "no checksum" in told(good)


def test_a_checksum_that_is_none_is_told(good: Path) -> None:
    header, _, data = parts(good.read_bytes())
    header["__metadata__"]["checksum"] = "\x1b[31m" + "a" * 70_000
    good.write_bytes(sealed(compact(header), data))
    assert r"; allowed: checksum \x1b[31maaa" in told(good)


# --- files whose checksum is right, that say what cannot be ---------------------------------------

_HUGE = "9" * 400
_NESTED = "[" * 200_000


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"data_offsets":[0,', '"data_offsets":["0",'),
        ('"data_offsets":[0,', '"data_offsets":[-2,'),
        ('"data_offsets":[0,', '"data_offsets":[0.5,'),
        ('"data_offsets":[0,', '"data_offsets":[2,'),
        ('"data_offsets":[0,', f'"data_offsets":[{_HUGE},'),
        ('"data_offsets":[0,', '"data_offsets":[NaN,'),
        ('"data_offsets":[0,', '"data_offsets":[1e400,'),
        ('"data_offsets":[0,', '"data_offsets":[null,'),
        ('"data_offsets":[0,', '"data_offsets":[[],'),
        ('"data_offsets":[0,', f'"data_offsets":[{_NESTED},'),
        ('"shape":[', '"shape":[NaN,'),
        ('"shape":[', '"shape":[-1,'),
        ('"shape":[', '"shape":[Infinity,'),
        ('"shape":[', f'"shape":[{_HUGE},'),
        ('"shape":[', f'"shape":[0,{2**64 - 1},'),
        ('"shape":[', '"shape":[true,'),
        ('"dtype":"BF16"', '"dtype":"BF17"'),
        ('"dtype":"BF16"', '"dtype":16'),
        ('"dtype":"BF16"', '"dtype":"BF16","dtype":"BF16"'),
        ('{"__metadata__":{', '{"__metadata__":{"format":"pt","format":"pt",'),
        ('{"__metadata__":{', '{"__metadata__":{"format":1,'),
        ('{"__metadata__":{', '{"__metadata__":{},"__metadata__":{'),
        ('{"__metadata__":{', f'{{"deep":{_NESTED},"__metadata__":{{'),
        ('"residual":{', '"\\ud800":{'),
        ('"residual":{', '"\ud800":{'),
        ('"residual":{', '"\\u001b[31mred":{'),
        ('"residual":{', '"\x1b[31mred":{'),
        ('"residual":{', '"next_weight":{'),
    ],
)
def test_a_header_that_says_what_cannot_be_is_told(good: Path, old: str, new: str) -> None:
    header, _, data = parts(good.read_bytes())
    text = compact(header)
    assert old in text
    good.write_bytes(sealed(text.replace(old, new, 1), data))
    told(good)


def test_past_the_end_overlapping_and_left_over_bytes_are_told(good: Path) -> None:
    header, _, data = parts(good.read_bytes())
    ends = sorted(header.keys() - {"__metadata__"}, key=lambda one: header[one]["data_offsets"])
    for name, change in ((ends[-1], 2), (ends[-1], 10**12), (ends[0], 2)):
        changed = json.loads(json.dumps(header))
        changed[name]["data_offsets"][1] += change
        good.write_bytes(sealed(compact(changed), data))
        told(good)
    good.write_bytes(sealed(compact(header), data + b"more"))
    told(good)


_OF = {  # the JSON types that each field may have
    "operation": (str,),
    "function": (str,),
    "call": (int,),
    "rank": (int,),
    "world_size": (int,),
    "num_tokens": (int,),
    "tokens": (list, type(None)),
    "arguments": (dict,),
    "environment": (dict,),
    "result": (dict, str, int, bool, type(None)),
    "raised": (str,),
    "trace": (str,),
    "changed": (list, type(None)),
    "destination": (bool, type(None)),
    "format": (int,),
}


@pytest.mark.parametrize("field", _OF)
def test_every_field_has_a_type(good: Path, field: str) -> None:
    whole = good.read_bytes()
    assert parts(whole)[1].keys() == _OF.keys()
    wrong: list[Any] = [None, True, -1, 1.5, 10**400, "text", [None], [[]], {"a": []}, {"kind": 1}]
    for value in wrong:
        kept = type(value) in _OF[field] and value not in (-1, 10**400)
        if kept and not isinstance(value, (list, dict)):
            continue
        good.write_bytes(whole)
        rewritten(good, lambda content, value=value: content.update({field: value}))
        told(good)
    good.write_bytes(whole)
    rewritten(good, lambda content: content.pop(field) and None)
    told(good)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda content: content.update(format=9), "format 9; allowed: format 2"),
        (lambda content: content.update(operation="gemm"), "operation 'gemm'"),
        (lambda content: content.update(operation="\x1b[31mred"), r"operation '\x1b[31mred'"),
        (lambda content: content.update(rank=1), "rank 1 of 1"),
        (lambda content: content.update(raised="ValueError: no"), "a result and an error"),
        (lambda content: content.update(changed=["y"]), "changes of y, which is no argument"),
        (lambda content: content.update(tokens=[0, 1]), "5 rows for 2 tokens of 5"),
        (lambda content: content.update(tokens=[0, 1, 2, 2, 4]), "tokens of the call in order"),
        (lambda content: content.update(tokens=[0, 1, 2, 3, 5]), "tokens of the call in order"),
        (lambda content: content.update(new=1), "unknown field `new`"),
        (lambda content: content["arguments"].pop("residual"), "nothing refers to tensor residual"),
        (lambda content: content["arguments"].update(residual=None, y=1), "nothing refers to"),
        (lambda content: content["arguments"].update(post_eps="$x"), ""),
        (lambda content: content["arguments"].update(y=1), "an argument y"),
        (lambda content: content["arguments"]["residual"].update(name="y"), "no tensor y"),
        (
            lambda content: content["arguments"]["residual"].update(name="next_weight"),
            "used twice",
        ),
        (lambda content: content["arguments"]["residual"].update(strides=[1]), "zip()"),
        (
            lambda content: content["arguments"]["residual"].update(strides=[10**9, 1]),
            "spread over",
        ),
        (lambda content: content["arguments"]["residual"].update(strides=[2**62, 1]), "spread"),
        (lambda content: content["arguments"]["residual"].update(strides=[-1, 1]), ">= 0"),
        (
            lambda content: content["arguments"].update(
                post_weight={"kind": "empty", "shape": [10**5, 10**6], "dtype": "float32"}
            ),
            "spread over 400,000,000,000 bytes",
        ),
        (
            lambda content: content["arguments"].update(
                post_weight={"kind": "empty", "shape": [1], "dtype": "nn"}
            ),
            "itemsize",
        ),
        (
            lambda content: content["arguments"].update(
                post_weight={"kind": "view", "of": "residual", "shape": [7]}
            ),
            "size",
        ),
        (
            lambda content: content["arguments"].update(
                next_eps={"kind": "float", "value": "0x1p99999"}
            ),
            "too large",
        ),
        (lambda content: content["arguments"]["x"].update(kind="class"), "Invalid value 'class'"),
        (lambda content: content["arguments"]["x"]["parts"].clear(), "missing 3 required"),
        (lambda content: content["arguments"].update(x=[1]), "got `array`"),
    ],
)
def test_metadata_that_says_what_cannot_be_is_told(good: Path, change: Any, said: str) -> None:
    rewritten(good, lambda content: change(content) and None)
    if said:
        assert said in told(good)
    else:  # a call like any other, that the contract refuses
        assert judge_files([good]).violations[0].rule == "DOMAIN-1"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "another form"),
        ("null", "another form"),
        ("[" * 10**6, "another form"),
        ('{"a":' * 10**5, "another form"),
        ('{"format":2,"arguments":{"x":' + '{"kind":"items","of":"list","items":[' * 10**4, ""),
        ("{}", "missing required field `format`"),
        ('{"format":' + _HUGE + "}", "another form"),
        ("x" * (5 << 20), "a header of"),
    ],
)
def test_metadata_that_is_none_is_told(good: Path, text: str, said: str) -> None:
    rewritten(good, text)
    assert said in told(good)


def test_a_key_twice_is_told(good: Path) -> None:
    text = compact(parts(good.read_bytes())[1])
    for old, new in (
        ('"rank":0', '"rank":0,"rank":0'),
        ('"arguments":{', '"arguments":{"post_eps":null,'),
        ('"function"', '"functio\\u006e"'),
        ('"rank":0', '"rank": 0'),
    ):
        assert old in text
        rewritten(good, text.replace(old, new))
        assert "a key twice, or text that is written in another way" in told(good)


def test_text_of_a_file_is_shown_harmlessly(tmp_path: Path) -> None:
    def raises(**given: Any) -> Any:
        raise ValueError("no")

    owner = types.SimpleNamespace(finalize_moe_output=raises)
    with capture(tmp_path, owner) as made, contextlib.suppress(ValueError):
        owner.finalize_moe_output(**case("permuted").arguments())
    (path,) = made.files
    text = {"function": "\x1b[31m\u202ename", "raised": "\x1b]0;title\x07Error: no\nbut"}
    text |= {"trace": "Traceback\n  \x9b2J"}
    rewritten(path, lambda content: content.update(text, environment={"\x00": "\x7f"}))
    dump = load_dump(path)
    assert dump.function == r"\x1b[31m\u202ename"
    assert dump.raised == "\\x1b]0;title\\x07Error: no\nbut"
    assert dump.trace == "Traceback\n  \\x9b2J"
    assert dump.environment == {r"\x00": r"\x7f"}


def test_a_world_of_300_million_ranks_is_told_at_once(tmp_path: Path) -> None:
    one = Case(ALLREDUCE, tokens=2, ranks=2, top_k=2, hidden=256)
    (call, _) = (one.arguments(rank) for rank in range(2))
    owner = types.SimpleNamespace(**{ALLREDUCE: lambda **given: (given["residual"], None)})
    with capture(tmp_path, owner) as made:
        getattr(owner, ALLREDUCE)(**call, workspace=None)
    (path,) = made.files
    size = 300_000_000
    rewritten(path, lambda content: content.update(world_size=size))
    started = time.monotonic()
    assert f"without rank 1, 2, 3, 4, 5, 6, 7, 8 and 299,999,991 more of {size}" in told(path)
    assert time.monotonic() - started < 5


_BOUNDED = """
import resource, sys
from moetail.conformance.dumps import DumpError, judge_files

judge_files(sys.argv[1:2])  # whatever is imported or made once
pages = int(open("/proc/self/statm").read().split()[0])
limit = pages * resource.getpagesize() + (256 << 20)
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
for path in sys.argv[2:]:
    try:
        judge_files([path])
        print("judged")
    except DumpError as error:
        print(error)
"""


def test_what_cannot_be_is_told_in_256_mib(good: Path) -> None:
    header, content, data = parts(good.read_bytes())
    metadata = header["__metadata__"]
    texts = [
        "[" * 2_000_000,
        "[],[]," * 400_000,
        compact({**content, "tokens": list(range(400_000))}),
        compact({**content, "result": {"kind": "items", "of": "list", "items": [1] * 1_000_000}}),
    ]
    files = [
        sealed(compact({**header, "__metadata__": {**metadata, "moetail": t}}), data) for t in texts
    ]
    entry = {"dtype": "U8", "shape": [0], "data_offsets": [len(data)] * 2}
    many = {**header, **{f"t{n}": entry for n in range(50_000)}}
    files.append(sealed(compact(many), data))
    files.append((1 << 62).to_bytes(8, "little") + b"{}")
    for strides in ([1 << 24, 1], [1 << 40, 1]):
        changed = json.loads(json.dumps(content))
        changed["arguments"]["residual"]["strides"] = strides
        text = compact(changed)
        files.append(
            sealed(compact({**header, "__metadata__": {**metadata, "moetail": text}}), data)
        )
    paths = [good.with_name(f"hostile-{number}") for number in range(len(files))]
    for path, file in zip(paths, files, strict=True):
        path.write_bytes(file)
    started = time.monotonic()
    run = [sys.executable, "-c", _BOUNDED, good, *paths]
    lines = subprocess.run(run, check=True, capture_output=True, text=True).stdout.splitlines()
    assert [line.partition(": found ")[0] for line in lines] == list(map(str, paths)), lines
    assert time.monotonic() - started < 60


# --- what is no dump at all -----------------------------------------------------------------------


def test_what_is_no_dump_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "empty").touch()
    (tmp_path / "text").write_text("not a dump at all, but longer than eight bytes")
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "folder").mkdir()
    safetensors.torch.save_file({"a": torch.zeros(3)}, tmp_path / "weights.safetensors")
    for name, said in {
        "pipe": "found a pipe, a socket or a device",
        "empty": "no safetensors file (0 bytes)",
        "text": "no safetensors file",
        "loop": "Too many levels of symbolic links",
        "folder": "found a directory",
        "weights.safetensors": "without moetail's metadata",
        "nowhere": "No such file",
        "x" * 300: "File name too long",
        "red\x1b[31m\n\udcff": r"red\x1b[31m\n\udcff: found No such file",
    }.items():
        with pytest.raises(SystemExit) as ended:
            main(["judge", str(tmp_path / name)])
        assert ended.value.code == 2
        printed = capsys.readouterr()
        assert said in printed.err
        assert printed.err.startswith("moetail: ")
        assert printed.err.count("\n") == 1
        assert printed.err[:-1].isprintable()
        assert printed.out == ""


def test_a_file_that_may_not_be_read_is_told(good: Path) -> None:
    good.chmod(0)
    if os.geteuid() == 0:  # who may read it all the same
        os.seteuid(65534)
    try:
        assert "Permission denied" in told(good)
    finally:
        if os.getuid() == 0:
            os.seteuid(0)
