"""What the pages of the documentation take from the code, so that nothing is copied by hand.

A line ``<!-- generated: NAME ARGUMENT -->`` in a page is replaced when mkdocs reads it. The
functions need no mkdocs, so that the tests call them without it.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import json
import os
import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "conformance" / "results"
PLOTS = (".png", ".svg")

_MARK = re.compile(r"^<!-- generated: ([\w-]+)(?: (.+?))? -->$", re.MULTILINE)


# --- the pages' parts -----------------------------------------------------------------------------


def contract() -> str:
    """The contract, as spec/CONTRACT.md has it, without its title."""
    from moetail.spec.document import document

    text = document()
    return re.sub(r"^# .*\n+<!--.*?-->\n+", "", text, count=1)


def rules() -> str:
    """Every rule, and the shortest of the mutants that break it."""
    from moetail.spec.rules import RULES, Kind

    parts = []
    for kind in Kind:
        parts.append(f"## {kind.value}: {kind.heading}\n")
        parts += [_rule(rule) for rule in RULES if rule.kind is kind]
    return "\n".join(parts)


def _rule(rule: Any) -> str:
    from moetail.conformance.catalogue import MUTANTS
    from moetail.spec.rules import operation

    mutants = [mutant for mutant in MUTANTS if mutant.rule == rule.id]
    names = ", ".join(f"`{operation(name).name}`" for name in rule.operations)
    lines = [
        f"### {rule.id}\n",
        f"{rule.statement}{' *(derived)*' if rule.derived else ''}\n",
        f"Broken by an implementation that {rule.breaks}.\n",
        f"Applies to {names}. Source: {rule.source}.\n",
    ]
    for mutant in mutants:
        seen = f" Seen in {mutant.source}." if mutant.source else ""
        lines.append(f"- `{mutant.id}`: {_escaped(mutant.sentence)}{seen}")
    if mutants:
        shown = min(mutants, key=lambda item: len(_source(item.made)))
        code = _indented(f"```python\n{_source(shown.made)}```")
        command = f"moetail check {shown.name} --rule {rule.id}"
        lines += [
            f'\n??? example "{shown.id}, the reference with one change"\n',
            f"{code}\n\n    `{command}`\n",
        ]
    return "\n".join(lines)


def _source(made: Any) -> str:
    return inspect.cleandoc(inspect.getsource(made)) + "\n"


# The judge's modules, in the order of its proof, with what in them is read too.
_JUDGE: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("rounding", "Rounding", ("round_bf16",)),
    ("admissible", "Sets of values", ("Admissible", "rounded", "part_of", "flushed")),
    ("summation", "Sums in any order", ("error_bound",)),
    ("elementwise", "Two values", ("multiply", "add")),
    ("reduction", "Routes and ranks", ("weighted_sum", "sum_ranks")),
    ("norm", "The norms", ("inverse_rms", "affine")),
    ("program", "The steps of a contract", ()),
)


def judge() -> str:
    """The judge's docstrings, which hold its arithmetic and the proof of it."""
    package = importlib.import_module("moetail.conformance.judge")
    parts = [_docstring(package, skip_first=True)]
    for name, heading, items in _JUDGE:
        module = importlib.import_module(f"moetail.conformance.judge.{name}")
        parts.append(f"## {heading}\n\n{_docstring(module)}")
        parts += [f"### `{item}`\n\n{_docstring(getattr(module, item))}" for item in items]
    return "\n\n".join(parts) + "\n"


def _docstring(item: Any, *, skip_first: bool = False) -> str:
    """A docstring as Markdown: roles as code, and blank lines around lists."""
    text = inspect.cleandoc(item.__doc__ or "")
    if skip_first:
        text = text.partition("\n\n")[2]
    text = re.sub(r":\w+:`[~.]?(?:moetail\.[\w.]*\.)?([\w.]+)`", r"`\1`", text)
    text = text.replace("``", "`")
    lines: list[str] = []
    listed = numbered = False
    for line in text.splitlines():
        starts = re.match(r"(- )|\d\. ", line)
        inside = starts or line.startswith(" ") or not line
        if (starts and (not listed or numbered)) or (listed and not inside):
            lines.append("")
        if listed and numbered and line.startswith("   "):
            line = f" {line}"  # Markdown indents what belongs to an item by four
        listed = bool(starts or (listed and inside))
        numbered = (not starts[1]) if starts else numbered and listed
        lines.append(line)
    return "\n".join(lines)


def command_line() -> str:
    """``moetail --help``, and that of every command."""
    from typer.main import get_command

    from moetail.conformance.cli.app import app

    commands = sorted(getattr(get_command(app), "commands", {}))
    parts = [_help()]
    parts += [f"## moetail {name}\n\n{_help(name)}" for name in commands]
    return "\n".join(parts)


def _help(*words: str) -> str:
    from typer.testing import CliRunner

    from moetail.conformance.cli.app import app

    # The width is rich's, read from the environment when the console is made.
    before = os.environ.get("COLUMNS")
    os.environ["COLUMNS"] = "92"
    try:
        done = CliRunner().invoke(app, [*words, "--help"], prog_name="moetail")
    finally:
        os.environ.pop("COLUMNS") if before is None else os.environ.update(COLUMNS=before)
    if done.exit_code != 0:
        raise RuntimeError(f"moetail {' '.join(words)} --help: {done.output}")
    text = re.sub(r"\x1b\[[0-9;]*m", "", done.output)
    lines = [line.rstrip() for line in text.strip("\n").splitlines()]
    return "```text\n" + "\n".join(lines).strip("\n") + "\n```\n"


def example(name: str) -> str:
    """A file of docs/examples, whole."""
    path = Path(__file__).parent / "examples" / name
    language = {".py": "python", ".cu": "cuda"}[path.suffix]
    return f'```{language} title="{name}"\n{path.read_text(encoding="utf-8")}```\n'


def template() -> str:
    """What ``moetail init`` writes for one operation."""
    from moetail.conformance.export.template import template as text

    return f'```python title="my_kernel.py"\n{text(("beam_moe_finalize",))}```\n'


def plots() -> str:
    """The plots that benchmarks left in conformance/results, or how to make them."""
    found = plot_files()
    if not found:
        return "No plots have been committed yet.\n"
    parts = []
    for path in found:
        machine = _machine(path.with_suffix(".json"))
        title = path.stem.replace("-", " ")
        parts.append(f"![{title}](results/{path.relative_to(RESULTS).as_posix()})\n\n{machine}\n")
    return "\n".join(parts)


def plot_files() -> list[Path]:
    return sorted(path for path in RESULTS.rglob("*") if path.suffix in PLOTS)


def _machine(path: Path) -> str:
    """Where the numbers beside a plot are from."""
    if not path.exists():
        return ""
    machine = json.loads(path.read_text(encoding="utf-8")).get("machine", {})
    facts = [f"{name} {machine[name]}" for name in ("driver", "cuda", "torch") if name in machine]
    if "date" in machine:
        facts.append(str(machine["date"]))
    return f"{machine.get('gpu', '')}: {', '.join(facts)}." if facts else ""


def figures() -> str:
    """Tables of what the benchmarks left in conformance/results."""
    parts = []
    for path in sorted(RESULTS.glob("bench-*.json")):
        report = json.loads(path.read_text(encoding="utf-8"))
        machine, rows = report["machine"], report["rows"]
        several = "gpus" in machine
        number = f"{machine['gpus']} x " if several else ""
        parts.append(f"### {number}{machine['gpu']}\n\n{_machine(path)} `{path.name}`\n")
        parts.append(_of_ranks(rows) if several else _of_kernels(machine, rows))
        if "host" in report:
            parts.append(_of_host(report["host"]))
    return "\n".join(parts) or "No figures have been committed yet.\n"


def _table(names: list[str], rows: list[list[str]]) -> str:
    lines = [names, ["---"] * len(names), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def _of_kernels(machine: dict[str, Any], rows: list[dict[str, Any]]) -> str:
    peers = (
        *("unfused", "unfused, vLLM's boundary", "vLLM", "vLLM, dependent launch"),
        *("FlashInfer's fused_add_rmsnorm", "torch.compile"),
    )
    model = next(row["model"] for row in rows)
    shown = []
    for row in (row for row in rows if row["model"] == model):
        times = [f"{name} {row[name] / row['us']:.2f}" for name in peers if name in row]
        own = row.get("share_of_own_stream")
        shown.append(
            [
                row["operation"],
                str(row["tokens"]),
                f"{row['us']:.2f}",
                f"{row['us'] / machine['empty_kernel_us']:.1f}",
                f"{row['share_of_best_bandwidth']:.3f}",
                "" if own is None else f"{own:.3f}",
                "; ".join(times),
            ]
        )
    text = _table(
        [
            *("operation", "tokens", "us", "of an empty kernel", "of the best bandwidth"),
            *("of its own stream", "peers' time, of ours"),
        ],
        shown,
    )
    large = sorted({row["tokens"] for row in rows if row["tokens"] >= 4096})
    models = list(dict.fromkeys(row["model"] for row in rows))
    operations = list(dict.fromkeys(row["operation"] for row in rows))
    share = {
        (row["operation"], row["model"], row["tokens"]): row["share_of_best_bandwidth"]
        for row in rows
    }
    others = [
        [one, str(size), *(f"{share[name, one, size]:.2f}" for name in operations)]
        for one in models
        for size in large
    ]
    shape = next(row for row in rows if row["model"] == model)
    intro = f"{model}, H = {shape['hidden']}, K = {shape['top_k']}:\n\n"
    by_model = _table(["model", "tokens", *operations], others)
    return f"{intro}{text}\nOf the best bandwidth, by model and tokens:\n\n{by_model}"


def _of_host(host: dict[str, dict[str, float]]) -> str:
    shown = [[name, f"{row['us']:.1f}", f"{row['of_add']:.2f}"] for name, row in host.items()]
    return "What an eager call costs the host:\n\n" + _table(
        ["call", "us", "of torch.add's"], shown
    )


def _of_ranks(rows: list[dict[str, Any]]) -> str:
    gathers = [
        [
            str(row["tokens"]),
            *(f"{row['us'][name]:.1f}" for name in ("oneshot", "twoshot", "unfused")),
            f"{row['default_of_unfused']:.2f}",
            f"{row['default_of_floor']:.2f}",
        ]
        for row in rows
        if row["operation"] == "gather"
    ]
    reduces = [
        [
            str(row["tokens"]),
            *(
                f"{row['us'][name]:.1f}" if name in row["us"] else ""
                for name in ("fused", "unfused", "flashinfer")
            ),
            *(
                f"{row['not_correctly_rounded'][name]:.4%}"
                if name in row["not_correctly_rounded"]
                else ""
                for name in ("fused", "flashinfer")
            ),
        ]
        for row in rows
        if row["operation"] == "all-reduce"
    ]
    return (
        "Gather tail, us:\n\n"
        + _table(
            [
                *("tokens", "oneshot", "twoshot", "unfused over NCCL", "default, of unfused"),
                "default, of the larger floor",
            ],
            gathers,
        )
        + "\nAll-reduce tail, us, and residual elements that are not correctly rounded:\n\n"
        + _table(
            [
                *("tokens", "fused", "unfused over NCCL", "FlashInfer", "fused, not rounded"),
                "FlashInfer, not rounded",
            ],
            reduces,
        )
    )


GENERATED: dict[str, Callable[..., str]] = {
    "contract": contract,
    "rules": rules,
    "judge": judge,
    "command-line": command_line,
    "example": example,
    "template": template,
    "plots": plots,
    "figures": figures,
}


def filled(markdown: str) -> str:
    """A page with its generated parts; a KeyError names a part that there is not."""

    def part(found: re.Match[str]) -> str:
        arguments = [found[2]] if found[2] else []
        return GENERATED[found[1]](*arguments).rstrip("\n")

    return _MARK.sub(part, markdown)


def sample_report() -> str:
    """The report of a mutant, as an example of one."""
    import torch

    from moetail.conformance.catalogue import change
    from moetail.conformance.report.page import report_html
    from moetail.conformance.run.plan import Plan
    from moetail.conformance.suite import run_suite
    from moetail.spec.rules import FINALIZE

    torch.set_num_threads(1)
    rules = tuple(f"ROUND-{number}" for number in range(1, 5))
    name = change("scale-before-rounding").name
    return report_html(run_suite(name, Plan(), operations=(FINALIZE,), rules=rules))


def _escaped(text: str) -> str:
    return re.sub(r"([*_<])", r"\\\1", text)


def _indented(text: str) -> str:
    return "\n".join(f"    {line}".rstrip() for line in text.splitlines())


# --- mkdocs ---------------------------------------------------------------------------------------


def on_files(files: Any, config: Any) -> Any:
    """Adds the plots, and a report to look at."""
    from mkdocs.structure.files import File

    for path in plot_files():
        name = f"results/{path.relative_to(RESULTS).as_posix()}"
        files.append(File.generated(config, name, abs_src_path=str(path)))
    files.append(File.generated(config, "sample/report.html", abs_src_path=_sample()))
    return files


@functools.cache
def _sample() -> str:
    path = Path(tempfile.mkdtemp()) / "report.html"
    path.write_text(sample_report(), encoding="utf-8")
    return str(path)


def on_page_markdown(markdown: str, **_: Any) -> str:
    return filled(markdown)
