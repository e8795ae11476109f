"""What a violation leaves for the report: the first wrong elements, and where all of them lie.

Plain lists, numbers and strings, and few of them: evidence travels from the workers of pytest-xdist
and into report.json. A distance is counted in units in the last place of the output's dtype, as the
number of representable values from the one found to the nearest admissible one.
"""

from __future__ import annotations

import base64
import zlib
from typing import Any

import torch
from torch import Tensor

from moetail.conformance.judge import OutputVerdict, Verdict

__all__ = [
    "BANDS",
    "CLASS",
    "FIRST_BAND",
    "LEVEL",
    "LEVELS",
    "MOST_CELLS",
    "MOST_ELEMENTS",
    "NOT_JUDGED",
    "RIGHT",
    "band_name",
    "cells_of",
    "codes_of",
    "comparison_evidence",
    "verdict_evidence",
]

MOST_ELEMENTS = 20
"""Wrong elements that are listed of each output."""

MOST_CELLS = 128
"""Rows and columns of the picture of an output, at most."""

BANDS = (1, 2, 4, 8, 64, 4096)
"""Distances in ulps are told apart by these; each band reaches to below the next."""

# What a cell of the picture shows, the worst of its elements: right, not judged, a band of
# distances, or a NaN where there should be none, or the reverse.
RIGHT = 0
NOT_JUDGED = 1
FIRST_BAND = 2
CLASS = FIRST_BAND + len(BANDS)

LEVELS = 4
"""How much of a cell is wrong, in quarters; a cell is its code plus ``LEVEL`` times the quarter."""

LEVEL = 16

_CHUNK = 1 << 22

_NAMES = {RIGHT: "admissible", NOT_JUDGED: "not judged", CLASS: "NaN against a number"}
_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def band_name(code: int) -> str:
    """What a code stands for, in words."""
    if code in _NAMES:
        return _NAMES[code]
    least = BANDS[code - FIRST_BAND]
    if code + 1 == CLASS:
        return f"{least:,} ulps or more"
    most = BANDS[code - FIRST_BAND + 1] - 1
    return "1 ulp" if most == 1 else f"{least:,} to {most:,} ulps"


def cells_of(grid: dict[str, Any]) -> list[list[int]]:
    """The cells of a picture, row by row: code + LEVEL * (quarters that are wrong - 1)."""
    rows, columns = grid["shape"]
    cells = zlib.decompress(base64.b64decode(grid["cells"]))
    return [list(cells[row * columns : (row + 1) * columns]) for row in range(rows)]


def codes_of(grid: dict[str, Any]) -> list[list[int]]:
    """The codes alone."""
    return [[cell % LEVEL for cell in row] for row in cells_of(grid)]


def verdict_evidence(verdict: Verdict) -> list[dict[str, Any]]:
    """Evidence of each output of each rank, those that conform included."""
    return [_of_output(output) for output in verdict.outputs]


def comparison_evidence(name: str, first: Tensor, second: Tensor) -> list[dict[str, Any]]:
    """Evidence of two results that should have the same bits; the first counts as right."""
    found = {"rank": 0, "name": name, "shape": list(first.shape), "compared": True}
    if not first.numel():
        return [found]
    second = second.to(first.device)
    if first.dim() != 2:
        rows = first.shape[0] if first.dim() else 1
        first, second = first.reshape(rows, -1), second.reshape(rows, -1)
    if first.is_floating_point():
        view = _BITS[first.element_size()]
        wrong = first.contiguous().view(view) != second.contiguous().view(view)
    else:
        wrong = first != second
    return [found | _elements(second, first, first, wrong)]


def _of_output(output: OutputVerdict) -> dict[str, Any]:
    found = {
        "rank": output.rank,
        "name": output.name,
        "shape": list(output.wrong_mask.shape),
        "judged": output.judged,
        "not_judged": output.not_judged,
        "wrong": output.wrong,
    }
    if output.structure is not None:
        return found | {"structure": output.structure}
    if output.got is None or output.lo is None or output.hi is None or not output.wrong:
        return found
    return found | _elements(output.got, output.lo, output.hi, output.wrong_mask)


def _elements(got: Tensor, lo: Tensor, hi: Tensor, wrong: Tensor) -> dict[str, Any]:
    """The first wrong elements, how far the wrong ones are off, and the picture."""
    tokens, hidden = got.shape
    height, width = (-(-size // MOST_CELLS) for size in (tokens, hidden))
    rows, columns = -(-tokens // height), -(-hidden // width)
    step = height * max(1, _CHUNK // max(1, hidden * height))
    first: list[dict[str, Any]] = []
    distances = torch.zeros(CLASS + 1, dtype=torch.int64)
    cells: list[Tensor] = []
    for start in range(0, tokens, step):
        part = slice(start, min(start + step, tokens))
        parts = [item[part].cpu() for item in (got, lo, hi, wrong)]
        codes, bad = _codes(*parts), parts[3]
        distances += torch.bincount(codes[bad], minlength=CLASS + 1)
        cells.append(_cells(codes, height, width))
        for token, column in bad.nonzero()[: MOST_ELEMENTS - len(first)].tolist():
            place = (token, column)
            at = [item[place].reshape(1) for item in parts[:3]]
            ulps = None if int(codes[place]) == CLASS else int(_distances(*at))
            named = dict(zip(("got", "lo", "hi"), map(_shown, at), strict=True))
            first.append({"index": [start + token, column], "ulps": ulps, **named})
    by_token, by_column = (wrong.any(dim=dim).nonzero().flatten().tolist() for dim in (1, 0))
    packed = zlib.compress(bytes(torch.cat(cells).flatten().tolist()), 9)
    return {
        "wrong": int(distances.sum()),
        "first": first,
        "distances": [[code, count] for code, count in enumerate(distances.tolist()) if count],
        "tokens": [by_token[0], by_token[-1], len(by_token)],
        "hidden": [by_column[0], by_column[-1], len(by_column)],
        "grid": {
            "shape": [rows, columns],
            "cell": [height, width],
            "cells": base64.b64encode(packed).decode(),
        },
    }


def _ordered(values: Tensor) -> Tensor:
    """Integers in the order of the values, one apart where no value lies between; both zeros 0."""
    if not values.is_floating_point():
        return values.to(torch.int64)
    bits = values.contiguous().view(_BITS[values.element_size()]).to(torch.int64)
    magnitude = bits & ((1 << (8 * values.element_size() - 1)) - 1)
    return torch.where(bits < 0, -magnitude, magnitude)


def _distances(got: Tensor, lo: Tensor, hi: Tensor) -> Tensor:
    """Steps to the nearest admissible value; of a wrong element at least one."""
    found = _ordered(got)
    return torch.maximum(_ordered(lo) - found, found - _ordered(hi)).clamp(min=1)


def _codes(got: Tensor, lo: Tensor, hi: Tensor, wrong: Tensor) -> Tensor:
    bands = torch.bucketize(_distances(got, lo, hi), torch.tensor(BANDS), right=True)
    codes = (bands + FIRST_BAND - 1).masked_fill(got.isnan() != lo.isnan(), CLASS)
    codes = codes.masked_fill(~wrong, RIGHT)
    if got.is_floating_point():
        codes = codes.masked_fill((lo == float("-inf")) & (hi == float("inf")), NOT_JUDGED)
    return codes


def _cells(codes: Tensor, height: int, width: int) -> Tensor:
    """Of each cell of ``height`` by ``width`` elements the largest code, and the share wrong."""
    tokens, hidden = codes.shape
    # What pads the last cells is told apart, so that it counts for nothing.
    padded = torch.nn.functional.pad(codes, (0, -hidden % width, 0, -tokens % height), value=-1)
    rows, columns = padded.shape[0] // height, padded.shape[1] // width
    blocks = padded.view(rows, height, columns, width)
    wrong = (blocks >= FIRST_BAND).sum(dim=(1, 3))
    there = (blocks >= 0).sum(dim=(1, 3))
    quarters = (LEVELS * wrong + there - 1) // there
    return blocks.amax(dim=(1, 3)) + LEVEL * (quarters - 1).clamp(min=0)


def _shown(value: Tensor) -> list[str]:
    """Value and bits of one element."""
    if not value.is_floating_point():
        return [str(int(value)), ""]
    size = value.element_size()
    bits = int(value.view(_BITS[size])) & ((1 << 8 * size) - 1)
    number = "NaN" if bool(value.isnan()) else f"{float(value):.7g}"
    return [number, f"{bits:#0{2 + 2 * size}x}"]
