"""Eager calls on plain CUDA tensors: past the words of the checks, and past the dispatcher.

One call of compiled code (``csrc/direct.cu``) looks at the arguments and launches. A function of
this module returns what its operation returns; or None, with nothing done, where a call needs more:
something traces or intercepts it, gradients are recorded, a tensor is not a plain one on a GPU
whose kernels are loaded, the arguments need a step that is seldom needed, or they are to be
refused. The operation then goes through :mod:`moetail.spec.checks`, which say in words what is
wrong, and through its operator.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from moetail.kernels.operators import loaded
from moetail.kernels.workspace import BeamAllReduceWorkspace, default_strategy

__all__ = ["allreduce", "boundary", "finalize", "finalize_output", "fused", "gather"]

Outputs = tuple[Tensor, Tensor | None] | None

_PLAIN = frozenset({Tensor, Parameter, type(None)})
_torch: Any = torch._C  # it has no types
_dynamo_traces = torch.compiler.is_dynamo_compiling
_dispatch_modes = _torch._len_torch_dispatch_stack
_function_modes = _torch._len_torch_function_stack
_functorch_level = _torch._functorch.maybe_current_level
_jit_traces = _torch._is_tracing
_records_gradients = torch.is_grad_enabled


def _kernels_for(tensors: tuple[Any, ...]) -> Any:
    """The kernels of the GPU where the first is; the others may be None.

    None where there are none, and where something but the kernels has to see the call.
    """
    if _dynamo_traces():  # before all that cannot be traced
        return None
    first = tensors[0]
    if type(first) is not Tensor or not _PLAIN.issuperset(map(type, tensors)):
        return None
    if _dispatch_modes() or _function_modes() or _jit_traces() or _functorch_level() is not None:
        return None
    if _records_gradients():
        for tensor in tensors:
            if tensor is not None and tensor.requires_grad:
                return None
    return loaded.get(first.get_device())


def _routes(x: Any) -> Any:
    """Rows, weights and map; None where x has no such fields."""
    try:
        return x.gemm2_permuted, x.expert_weights, x.expanded_idx_to_permuted_idx
    except AttributeError:
        return None


def _output(x: Any) -> Any:
    """Of a MoEOutput the tensors, None for those it has not, and the rest; None where x is none."""
    try:
        routed, shared, factor = x.routed, x.shared_output, x.routed_scaling_factor
        if type(routed) is Tensor:
            return (routed, None, None, shared), (factor, False)
        routes = _routes(routed)
        return None if routes is None else ((*routes, shared), (factor, bool(routed.route_major)))
    except AttributeError:
        return None


def _exchange(workspace: Any) -> Any:
    """What the kernels take of a workspace; None where it has no buffers of ours."""
    if type(workspace) is not BeamAllReduceWorkspace or workspace.buffers is None:
        return None
    return (
        workspace.world_size,
        workspace.hidden_size,
        workspace.max_tokens,
        workspace.rank,
        workspace.deadline_s,
        *workspace.buffers.given,
    )


def _call(function: Any, arguments: tuple[Any, ...], made: Any) -> Any:
    """What was made, if the function takes the arguments and launches."""
    try:
        return made if function(*arguments) else None
    except RuntimeError:  # a tensor without memory or strides; a launch that fails, fails once more
        return None


def _tail(
    name: str,
    tensors: tuple[Any, ...],
    rest: tuple[Any, ...],
    tail: tuple[Any, ...],
    exchange: tuple[Any, ...] = (),
) -> Outputs:
    """An operation that ends with a boundary."""
    residual, post_weight, _, next_weight, next_eps, scales = tail
    if scales is None:
        scales = (1.0, 1.0)  # a product with 1.0 changes nothing, and nor does its rounding
    elif type(scales) is not tuple or len(scales) != 2:
        return None
    kernels = _kernels_for((residual, *tensors, post_weight, next_weight))
    if kernels is None:
        return None
    hidden = torch.empty_like(residual)
    made = hidden, None if next_eps is None else torch.empty_like(residual)
    given = tensors + rest + tail[:5] + scales + made + exchange
    outputs: Outputs = _call(getattr(kernels, name), given, made)
    return outputs


# Of what follows, ``tail`` is residual, post_weight, post_eps, next_weight, next_eps and scales.


def finalize(
    rows: Any, weights: Any, output: Any, routed_scale: Any, post_weight: Any, post_eps: Any
) -> Tensor | None:
    """``beam_moe_finalize``."""
    kernels = _kernels_for((output, rows, weights, post_weight))
    if kernels is None:
        return None
    given = (rows, weights, output, routed_scale, post_weight, post_eps)
    made: Tensor | None = _call(kernels.try_finalize, given, output)
    return made


def boundary(x: Any, tail: tuple[Any, ...]) -> Outputs:
    """``beam_norm_residual_norm``."""
    return _tail("try_boundary", (x,), (), tail)


def fused(x: Any, routed_scale: Any, tail: tuple[Any, ...]) -> Outputs:
    """``beam_moe_finalize_norm_residual_norm`` in one kernel."""
    routes = _routes(x)
    return None if routes is None else _tail("try_fused", routes, (routed_scale,), tail)


def finalize_output(x: Any) -> Tensor | None:
    """``finalize_moe_output``, where there is something to do."""
    found = _output(x)
    if found is None:
        return None
    tensors, rest = found
    rows, weights, _, shared = tensors
    if weights is None and shared is None and rest[0] == 1.0:
        return None
    kernels = _kernels_for(tensors)
    if kernels is None:
        return None
    if shared is None:
        shape = (rows if weights is None else weights).shape[:1] + rows.shape[1:]
        output = rows.new_empty(shape)
    else:
        output = torch.empty_like(shared)
    made: Tensor | None = _call(kernels.try_output, (*tensors, *rest, output), output)
    return made


def gather(
    x: Any, routed_scale: Any, strategy: Any, workspace: Any, tail: tuple[Any, ...]
) -> Outputs:
    """``beam_moe_finalize_gather_norm_residual_norm`` in one kernel."""
    routes, exchange, residual = _routes(x), _exchange(workspace), tail[0]
    if routes is None or exchange is None or type(residual) is not Tensor or residual.dim() != 2:
        return None
    if strategy is None:
        strategy = default_strategy(len(residual), workspace)
    if strategy != "oneshot" and strategy != "twoshot":
        return None
    return _tail("try_gather", routes, (routed_scale, strategy == "twoshot"), tail, exchange)


def allreduce(x: Any, workspace: Any, tail: tuple[Any, ...]) -> Outputs:
    """``beam_finalize_allreduce_norm_residual_norm`` in one kernel."""
    found, exchange = _output(x), _exchange(workspace)
    if found is None or exchange is None:
        return None
    tensors, rest = found
    return _tail("try_allreduce", tensors, rest, tail, exchange)
