"""Calls that tests of dumps capture, and files of them that say whatever a test wants."""

from __future__ import annotations

import json
import re
from hashlib import blake2b
from pathlib import Path
from typing import Any

from moetail.conformance.cases import Case
from moetail.conformance.dumps import capture

LOCAL = {
    "convert": "convert_flashinfer_moe_output/normal/T5-K3-H256/local:0.5",
    "convert-flat": "convert_flashinfer_moe_output/normal/T5-K3-H256/local:0.5+flat:yes",
    "convert-aliased": (
        "convert_flashinfer_moe_output/normal/T5-K3-H256/routed:finalized+aliased:yes"
    ),
    "route-major": "route_major_moe_output/normal/T5-K3-H256/local:0.5",
    "finalize": "beam_moe_finalize/normal/T5-K3-H256/cap:2+scale:2.5+post:affine",
    "boundary": "beam_norm_residual_norm/normal/T5-K1-H256/post:norm+next:affine+scales:0.5x0.3",
    "fused": "beam_moe_finalize_norm_residual_norm/normal/T5-K3-H256/cap:2+next:affine",
    "permuted": "finalize_moe_output/normal/T5-K3-H256/weights:bf16+scale:2.5+shared:yes+local:0.5",
    "route-major-output": (
        "finalize_moe_output/normal/T5-K3-H256/layout:route_major+local:0.5+shared:yes"
    ),
    "finalized": "finalize_moe_output/normal/T5-K3-H256/scale:2.5+shared:yes+routed:finalized",
}


def case(name: str) -> Case:
    return Case.parse(LOCAL[name])


def saved(folder: Path, implementation: Any, one: Case, **options: Any) -> Path:
    """One call of a local operation, captured."""
    with capture(folder, implementation, **options) as made:
        getattr(implementation, one.operation)(**one.arguments())
    (path,) = made.files
    return path


def parts(whole: bytes) -> tuple[dict[str, Any], dict[str, Any], bytes]:
    """A dump's header, its metadata as JSON, and the tensors' bytes."""
    end = 8 + int.from_bytes(whole[:8], "little")
    header = json.loads(whole[8:end])
    return header, json.loads(header["__metadata__"]["moetail"]), whole[end:]


def compact(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False)


def sealed(header: str | bytes, data: bytes) -> bytes:
    """A file of this header and data, whose checksum is right."""
    if isinstance(header, str):
        header = header.encode("utf-8", "surrogatepass")
    zeros = re.sub(rb'"checksum":"[0-9a-f]{32}"', b'"checksum":"' + b"0" * 32 + b'"', header)
    start = len(zeros).to_bytes(8, "little")
    digits = blake2b(start + zeros + data, digest_size=16).hexdigest().encode()
    return start + zeros.replace(b'"checksum":"' + b"0" * 32, b'"checksum":"' + digits) + data


def rewritten(path: Path, change: Any) -> None:
    """The dump with its metadata changed by a function, or put in its place as text."""
    header, content, data = parts(path.read_bytes())
    text = change if isinstance(change, str) else compact(change(content) or content)
    header["__metadata__"]["moetail"] = text
    path.write_bytes(sealed(compact(header), data))
