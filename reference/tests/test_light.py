"""What the reference costs an engine: torch, and the API's very signatures."""

from __future__ import annotations

import inspect
import subprocess
import sys

import pytest

from moetail import reference, spec

BLOCKED = """
import sys
import torch, torch.distributed, torch.multiprocessing
known = {name.partition(".")[0] for name in sys.modules}
known |= set(sys.stdlib_module_names) | {"torch", "moetail"}

class OnlyTorch:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] not in known:
            raise ImportError(f"{name} is neither torch nor the standard library")
        if name.startswith(("moetail.conformance", "moetail.kernels")):
            raise ImportError(f"the reference must not need {name}")

sys.meta_path.insert(0, OnlyTorch())
try:
    import pytest
except ImportError:
    pass
else:
    sys.exit("the hook blocks nothing")
import moetail.reference as reference
rows = torch.ones(4, 2, 256, dtype=torch.bfloat16)
out = torch.empty(4, 256, dtype=torch.bfloat16)
reference.beam_moe_finalize(rows, torch.ones(4, 2), out, 2.0, None, 1e-6)
hidden, normalized = reference.beam_norm_residual_norm(out, out, None, 0.0, None, 0.0, (1.0, 1.0))
index = torch.arange(8, dtype=torch.int32).view(4, 2)
from moetail.spec import MoEOutput, UnfinalizedMoEOutput
routed = UnfinalizedMoEOutput(rows.view(8, 256), torch.ones(4, 2), index)
reference.beam_moe_finalize_norm_residual_norm(routed, out, None, None, None, None, None)
print(float(reference.finalize_moe_output(MoEOutput(routed, out, 2.0))[0, 0]), float(hidden[0, 0]))
"""


def test_torch_is_all_it_needs():
    finished = subprocess.run(
        [sys.executable, "-c", BLOCKED], capture_output=True, text=True, timeout=120, check=False
    )
    assert finished.returncode == 0, finished.stderr
    assert finished.stdout.split() == ["5.0", "2.0"]


@pytest.mark.parametrize("operation", [item.name for item in spec.OPERATIONS])
def test_signatures_are_the_protocols(operation):
    ours, contract = getattr(reference, operation), getattr(spec.MoETail, operation, None)
    if contract is None:
        ours, contract = ours.create, spec.api.WorkspaceFactory.create

    def spelled(function) -> list[tuple]:
        parameters = inspect.signature(function).parameters.values()
        return [(p.name, p.kind, p.default) for p in parameters if p.name not in ("self", "cls")]

    assert spelled(ours) == spelled(contract)
