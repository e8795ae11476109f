"""What imports what in the four packages, read from their sources; and the picture of it.

CONTRIBUTING.md shows the packages and their arrows, generated so that they cannot drift:

    python -m conformance.tests.imports            print the picture
    python -m conformance.tests.imports --write    write it into CONTRIBUTING.md
    python -m conformance.tests.imports --check    exit 1 with a diff where the file has drifted

It needs the standard library alone, so that the lint session can run it without torch.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
PATH = ROOT / "CONTRIBUTING.md"
COMMAND = "python -m conformance.tests.imports --write"
BEGIN, END = f"<!-- begin: {COMMAND} -->", f"<!-- end: {COMMAND} -->"


@cache
def modules() -> dict[str, Path]:
    """Every module of the four packages, by its dotted name."""
    found = {}
    for base in ("spec", "reference", "kernels", "conformance"):
        for path in (ROOT / base / "moetail").rglob("*.py"):
            parts = path.relative_to(ROOT / base).with_suffix("").parts
            found[".".join(parts).removesuffix(".__init__")] = path
    return found


def imports(source: str, name: str) -> Iterator[str]:
    """The modules of ours that a source imports, also inside functions and for types alone."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (item.name for item in node.names if item.name in modules())
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name}: a relative import"
            for item in node.names:
                inner = f"{node.module}.{item.name}"
                if inner in modules():
                    yield inner
                elif node.module in modules():
                    yield str(node.module)


@cache
def graph() -> dict[str, set[str]]:
    """By module, those that it imports."""
    return {
        name: set(imports(path.read_text(encoding="utf-8"), name)) - {name}
        for name, path in modules().items()
    }


def package_of(name: str) -> str:
    """ "run" of moetail.conformance.run.call, "spec" of moetail.spec.rules."""
    parts = name.split(".")
    return parts[2] if parts[1] == "conformance" and len(parts) > 2 else parts[1]


def packages() -> dict[str, set[str]]:
    """By package, those that it imports; conformance alone is no package of its own."""
    found: dict[str, set[str]] = {}
    for name, targets in graph().items():
        here = found.setdefault(package_of(name), set())
        here |= {package_of(target) for target in targets} - {package_of(name)}
    found.pop("conformance")
    return found


def reduced(edges: Mapping[str, set[str]]) -> dict[str, set[str]]:
    """The fewest edges over which everything still reaches what it reached."""
    kept = {name: set(targets) for name, targets in edges.items()}
    for name in sorted(kept):
        for target in sorted(kept[name]):
            kept[name].discard(target)
            if target not in _reached(kept, name):
                kept[name].add(target)
    return kept


def _reached(edges: Mapping[str, set[str]], start: str) -> set[str]:
    found: set[str] = set()
    ahead = [start]
    while ahead:
        new = edges[ahead.pop()] - found
        found |= new
        ahead += new
    return found


def picture() -> str:
    """A flowchart of the packages; an arrow that others imply is left out."""
    edges = reduced(packages())
    outer = ("spec", "reference", "kernels")
    lines = ["```mermaid", "flowchart TD"]
    lines += ["    subgraph conformance"]
    lines += [f"        {name}" for name in sorted(set(edges) - set(outer))]
    lines += ["    end"]
    lines += [
        f"    {name} --> {target}" for name in sorted(edges) for target in sorted(edges[name])
    ]
    return "\n".join([*lines, "```"])


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog=COMMAND.rpartition(" ")[0], description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    action = parser.add_mutually_exclusive_group()
    action.add_argument("--write", action="store_true", help="write the picture")
    action.add_argument("--check", action="store_true", help="compare it with the file")
    parser.add_argument("path", nargs="?", type=Path, default=PATH, help="default: %(default)s")
    options = parser.parse_args(arguments)
    if not (options.write or options.check):
        print(picture())
        return 0
    before = options.path.read_text(encoding="utf-8")
    part = f"{BEGIN}\n{picture()}\n{END}"
    after, times = re.subn(f"{BEGIN}.*?{END}", lambda _: part, before, flags=re.DOTALL)
    if times != 1:
        parser.error(f"{options.path} has {times} parts from {BEGIN} to {END}; allowed: one")
    if options.write:
        options.path.write_text(after, encoding="utf-8")
        return 0
    lines = list(
        difflib.unified_diff(
            before.splitlines(), after.splitlines(), str(options.path), "generated", lineterm=""
        )
    )
    print("\n".join(lines), end="\n" if lines else "")
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
