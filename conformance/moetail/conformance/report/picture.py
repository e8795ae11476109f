"""Where the wrong elements lie: an output as a picture, tokens by hidden.

A PNG inside an SVG: the image keeps a dense picture small, the SVG gives it axes, a title and a
description. Nothing but the standard library is needed for either.
"""

from __future__ import annotations

import base64
import struct
import zlib
from html import escape
from typing import Any

from moetail.conformance.run.evidence import CLASS, LEVEL, LEVELS, NOT_JUDGED, RIGHT, cells_of

__all__ = ["COLOURS", "png", "svg"]

COLOURS: tuple[str | None, ...] = (
    None,
    "#8a949e",
    "#e6a700",
    "#e67f0d",
    "#dd5c2b",
    "#c43a4b",
    "#a02f7f",
    "#7440c4",
    "#00857c",
)
"""The colour of every code; None is transparent. The bands darken with the distance."""

assert len(COLOURS) == CLASS + 1
assert COLOURS[RIGHT] is None
assert COLOURS[NOT_JUDGED]

# A cell of which few elements are wrong is paler.
_OPACITY = (90, 140, 200, 255)

assert len(_OPACITY) == LEVELS

_LEFT, _TOP, _BOTTOM = 44, 4, 30


def png(cells: list[list[int]]) -> bytes:
    """An image of one pixel a cell, with a palette."""
    height, width = len(cells), len(cells[0])
    colours = [*COLOURS, *[None] * (LEVEL - len(COLOURS))]
    palette = b"".join(bytes.fromhex((colour or "#000000")[1:]) for colour in colours) * LEVELS
    opaque = bytes(0 if colour is None else level for level in _OPACITY for colour in colours)
    rows = b"".join(b"\0" + bytes(row) for row in cells)
    parts = (
        (b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 3, 0, 0, 0)),
        (b"PLTE", palette),
        (b"tRNS", opaque),
        (b"IDAT", zlib.compress(rows, 9)),
        (b"IEND", b""),
    )
    return b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(*part) for part in parts)


def _chunk(kind: bytes, data: bytes) -> bytes:
    checksum = zlib.crc32(kind + data)
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", checksum)


def svg(output: dict[str, Any], *, label: str, width: int, block: int = 0) -> str:
    """The picture of one output of one rank.

    Args:
        output: its evidence.
        label: what a screen reader says.
        width: of the picture without its axis, in pixels.
        block: tokens of a rank, where dashed lines are to part the ranks' blocks; 0: none.
    """
    tokens, hidden = output["shape"]
    grid = output.get("grid")
    rows = grid["shape"][0] if grid else min(tokens, 128)
    height = max(1, rows) * min(14.0, max(1.5, 150 / max(1, rows)))
    parts = [
        f'<svg role="img" aria-label="{escape(label)}" width="{width + _LEFT + 4}"'
        f' height="{height + _TOP + _BOTTOM:.0f}"'
        f' viewBox="0 0 {width + _LEFT + 4} {height + _TOP + _BOTTOM:.0f}">',
        f'<rect class="right" x="{_LEFT}" y="{_TOP}" width="{width}" height="{height:g}"/>',
    ]
    if grid:
        image = base64.b64encode(png(cells_of(grid))).decode()
        parts.append(
            f'<image x="{_LEFT}" y="{_TOP}" width="{width}" height="{height:g}"'
            f' preserveAspectRatio="none" href="data:image/png;base64,{image}"/>'
        )
    for token in range(block, tokens, block) if block else ():
        y = f"{_TOP + height * token / tokens:.1f}"
        parts.append(f'<line class="block" x1="{_LEFT}" x2="{_LEFT + width}" y1="{y}" y2="{y}"/>')
    base = _TOP + height
    texts: list[tuple[float, float, str, str]]
    texts = [(_LEFT, base + 12, "start", "0"), (_LEFT + width, base + 12, "end", str(hidden - 1))]
    texts += [(_LEFT + width / 2, base + 24, "middle", "hidden")]
    texts += [(_LEFT - 4, _TOP + 9, "end", "0")]
    if tokens > 1:
        texts.append((_LEFT - 4, base - 1, "end", str(tokens - 1)))
    parts += [
        f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}">{text}</text>'
        for x, y, anchor, text in texts
    ]
    middle = _TOP + height / 2
    if height >= 48:
        parts.append(
            f'<text x="12" y="{middle:g}" text-anchor="middle"'
            f' transform="rotate(-90 12 {middle:g})">token</text>'
        )
    else:
        parts.append(f'<text x="{_LEFT - 4}" y="{base + 12:g}" text-anchor="end">token</text>')
    return "".join([*parts, "</svg>"])
