"""Folders that a command writes into."""

from __future__ import annotations

from pathlib import Path

from moetail.conformance.implementation import UsageError

__all__ = ["make_folder"]


def make_folder(option: str, path: Path | None) -> Path | None:
    """The folder of an option, made where it is not there."""
    if path is None:
        return None
    folder = path.expanduser().resolve()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as error:
        raise UsageError(f"{option}: {folder}: {error.strerror}; allowed: a folder") from None
    except OSError:
        pass  # said where something is written: the verdict does not hang on it
    return folder
