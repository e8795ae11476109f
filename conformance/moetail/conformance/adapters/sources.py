"""One source file of a package that is installed, unpacked, or a wheel; nothing is imported."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import zipfile
from dataclasses import dataclass, replace
from email.parser import HeaderParser
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from moetail.conformance.implementation import UsageError

__all__ = ["Source", "find_source", "release_beside"]


@dataclass(frozen=True)
class Source:
    """A file of a package.

    Attributes:
        name: where it was found, for tracebacks.
        text: what it says.
        release: the package's version, "unknown" where nothing says it.
    """

    name: str
    text: str
    release: str


def find_source(distribution: str, file: str, *, variable: str, known: str) -> Source:
    """The file, of the installed package or of what an environment variable names.

    Args:
        distribution: the package as pip names it.
        file: its path from the folder that packages are installed in.
        variable: the environment variable that may name a wheel, or a folder where one was
            unpacked.
        known: a release that has the file.

    Raises:
        UsageError: no such package or file; says what to install.
    """
    allowed = (
        f"{distribution} {known} or newer, installed with pip, or a wheel of it (or a folder where "
        f"one was unpacked) named by the environment's {variable}"
    )
    named = os.environ.get(variable)
    if named:
        path = Path(named).expanduser()
        if not path.is_dir() and not zipfile.is_zipfile(path):
            raise UsageError(f"{variable}: {path} is no folder and no wheel; allowed: {allowed}")
        source = _in_folder(path, file) if path.is_dir() else _in_wheel(path, file)
    else:
        package = file.split("/")[0]
        # Of a top-level package, this looks for its folder and imports nothing.
        spec = importlib.util.find_spec(package)
        places = [] if spec is None else list(spec.submodule_search_locations or ())
        if not places:
            raise UsageError(f"{distribution} is not installed; allowed: {allowed}")
        source = _in_folder(Path(places[0]).parent, file)
        with contextlib.suppress(PackageNotFoundError):
            source = replace(source, release=version(distribution))
    if not source.text:
        raise UsageError(f"{distribution} {source.release} has no {file}; allowed: {allowed}")
    return source


def release_beside(path: Path, package: str) -> str:
    """The release of the package whose metadata lies beside a file; "unknown" without."""
    metadata = path.parent.glob(f"{package}*.dist-info/METADATA")
    return _release([item.read_text("utf-8") for item in metadata])


def _in_folder(folder: Path, file: str) -> Source:
    path = folder / file
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    return Source(str(path), text, release_beside(folder / "any", file.split("/")[0]))


def _in_wheel(wheel: Path, file: str) -> Source:
    with zipfile.ZipFile(wheel) as opened:
        names = opened.namelist()
        metadata = [opened.read(one).decode() for one in names if _is_metadata(one)]
        text = opened.read(file).decode() if file in names else ""
    return Source(f"{wheel.name}/{file}", text, _release(metadata))


def _is_metadata(name: str) -> bool:
    return name.endswith(".dist-info/METADATA")


def _release(metadata: list[str]) -> str:
    found = [HeaderParser().parsestr(text).get("Version", "") for text in metadata]
    return found[0] if found else "unknown"
