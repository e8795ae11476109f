"""Dimensions and routing of the public models whose MoE layers the producers imitate."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["MODELS", "Model"]


@dataclass(frozen=True)
class Model:
    """One model's MoE layer, as its published configuration gives it.

    Attributes:
        name: the key in :data:`MODELS`.
        hidden: H, elements.
        experts: E, routed experts of a layer.
        top_k: K, routed experts of a token.
        scoring: "softmax" or "sigmoid" scores of the router.
        renormalize: the chosen weights are divided by their sum.
        bias: a correction bias takes part in the choice of experts, not in their weights.
        groups: expert groups of the choice; 1 means none.
        kept_groups: groups that a token may choose from.
        routed_scale: the routed scaling factor.
        shared: the layer has shared experts.
        in_domain: H lies in the domain of the Beam operations.
    """

    name: str
    hidden: int
    experts: int
    top_k: int
    scoring: str = "softmax"
    renormalize: bool = True
    bias: bool = False
    groups: int = 1
    kept_groups: int = 1
    routed_scale: float = 1.0
    shared: bool = False

    @property
    def in_domain(self) -> bool:
        return 256 <= self.hidden <= 8192 and self.hidden % 256 == 0 and 1 <= self.top_k <= 32


MODELS: dict[str, Model] = {
    model.name: model
    for model in (
        Model(
            "deepseek-v3",
            7168,
            256,
            8,
            scoring="sigmoid",
            bias=True,
            groups=8,
            kept_groups=4,
            routed_scale=2.5,
            shared=True,
        ),
        Model(
            "kimi-k2",
            7168,
            384,
            8,
            scoring="sigmoid",
            bias=True,
            routed_scale=2.827,
            shared=True,
        ),
        Model("qwen3-235b", 4096, 128, 8),
        Model("glm-4.5", 5120, 160, 8, scoring="sigmoid", bias=True, routed_scale=2.5, shared=True),
        Model("minimax-m2", 3072, 256, 8, scoring="sigmoid", bias=True),
        Model("mixtral-8x7b", 4096, 8, 2),
        Model("qwen3-next-80b", 2048, 512, 10, shared=True),
        Model("llama4-maverick", 5120, 128, 1, scoring="sigmoid", renormalize=False, shared=True),
        # H = 2880 is no multiple of 256: the Beam operations must refuse it.
        Model("gpt-oss-120b", 2880, 128, 4),
    )
}
