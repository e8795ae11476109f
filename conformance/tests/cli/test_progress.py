"""Progress where nobody watches a terminal: a line now and then, on standard error."""

from __future__ import annotations

import time

import pytest

from moetail.conformance.cli.progress import Progress


def test_a_line_now_and_then(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    with Progress() as progress:
        for done in range(1000):
            progress.show(done, 1000, f"check [{done}]")
            now += 0.125
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.splitlines() == [
        f"{done} of 1,000 after {done / 8:.0f} s: check [{done}]" for done in range(120, 1000, 120)
    ]
