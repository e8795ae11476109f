"""The file that ``moetail init`` writes: the operations' signatures and texts, to be filled.

What is not filled must count neither as provided nor as wrong, so each operation stands there
under a name of its own, ``todo_`` and the operation's. Taking ``todo_`` off provides it.
"""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from moetail.conformance.implementation import UsageError
from moetail.spec import BEAM, OPERATIONS, MoETail, operation
from moetail.spec.api import WorkspaceFactory
from moetail.spec.formulas import formula
from moetail.spec.operations import WORKSPACE

__all__ = ["TODO", "template", "unfilled", "write_template"]

TODO = "todo_"
"""In front of an operation's name: not filled yet, so not provided."""

_HEAD = '''\
"""Operations of the MoE tail, to be filled.

An operation is provided when it has its name. Here each is called {todo} and its name: fill one,
take {todo} off, and run

    moetail check {path}

Delete what you do not need: what is not provided is not judged. `moetail rules ID` explains a rule.
The checks raise what the contract refuses (DOMAIN-1, PACK-1), before anything has changed.
"""

from __future__ import annotations
'''

_WORKSPACE = """\
class {todo}{name}:
{docstring}

    @staticmethod
    def create(group, hidden_size, max_tokens, dtype):
        checks.check_workspace_request(hidden_size, max_tokens)
        raise NotImplementedError
"""


def unfilled(target: Any) -> list[str]:
    """The names in an implementation that say that an operation is not filled yet."""
    return [TODO + item.name for item in OPERATIONS if hasattr(target, TODO + item.name)]


def template(operations: Sequence[str] = (), path: str = "my_kernel.py") -> str:
    """The file's text.

    Args:
        operations: names of the operations to fill; empty is all.
        path: the file's name, for the command that it shows.
    """
    chosen = [item for item in OPERATIONS if not operations or item.name in operations]
    parts = [_workspace() if item is WORKSPACE else _function(item.name) for item in chosen]
    body = "\n\n".join(parts)
    names = [
        name
        for name in ("MoEOutput", "UnfinalizedMoEOutput", "Workspace", "checks")
        if re.search(rf"\b{name}\b", body)
    ]
    imports = ["from typing import Any\n"] if re.search(r"\bAny\b", body) else []
    imports += ["from torch import Tensor\n"] if re.search(r"\bTensor\b", body) else []
    imports += [f"from moetail.spec import {', '.join(names)}\n"] if names else []
    # In a docstring a name may hold neither its quotes nor an escape.
    shown = path if re.fullmatch(r"[\w./ -]+", path) else "FILE"
    head = _HEAD.format(todo=TODO, path=shown)
    return "\n".join([head, *imports, "", body])


def write_template(path: Path, operations: Sequence[str] = ()) -> list[str]:
    """Writes the file and returns the names in it that are to be filled.

    Raises:
        UsageError: the file is there already, or cannot be written; nothing has changed then.
    """
    if path.suffix != ".py":
        raise UsageError(f"FILE: {str(path)!r}; allowed: a name that ends in .py")
    text = template(operations, str(path))
    target = path.expanduser()
    try:
        file = target.open("x", encoding="utf-8")
    except FileExistsError:
        raise UsageError(f"FILE: {path} is there already; allowed: a new file") from None
    except OSError as error:
        raise UsageError(f"FILE: {path}: {error.strerror}; allowed: a new file") from None
    try:
        with file:
            file.write(text)
    except OSError as error:
        target.unlink(missing_ok=True)
        raise UsageError(f"FILE: {path}: {error.strerror}; allowed: a new file") from None
    return re.findall(rf"^(?:def|class) ({TODO}\w+)", text, re.MULTILINE)


def _function(name: str) -> str:
    function = getattr(MoETail, name)
    signature = inspect.signature(function)
    lines, keywords = [], False
    for parameter in list(signature.parameters.values())[1:]:
        if parameter.kind is parameter.KEYWORD_ONLY and not keywords:
            keywords = True
            lines.append("    *,")
        default = "" if parameter.default is parameter.empty else f" = {parameter.default!r}"
        lines.append(f"    {parameter.name}: {parameter.annotation}{default},")
    head = [f"def {TODO}{name}(", *lines, f") -> {signature.return_annotation}:"]
    item = operation(name)
    body = [f"# {stage + ':':<11} {formula(BEAM, stage)}" for stage in item.stages]
    body += [f"checks.check({name!r}, locals())".replace("'", '"')] if item.computes else []
    body.append("raise NotImplementedError")
    return "\n".join(
        [*head, _docstring(function), *textwrap.indent("\n".join(body), "    ").split("\n"), ""]
    )


def _workspace() -> str:
    docstring = _docstring(WorkspaceFactory.create)
    return _WORKSPACE.format(todo=TODO, name=WORKSPACE.name, docstring=docstring)


def _docstring(function: Callable[..., Any]) -> str:
    """The contract's own text, as it stands there."""
    text = inspect.cleandoc(function.__doc__ or "")
    text = re.sub(r":\w+:`[~.]?(?:moetail\.[\w.]*\.)?([\w.]+)`", r"``\1``", text)
    return textwrap.indent(f'"""{text}\n"""', "    ", lambda line: bool(line.strip()))
