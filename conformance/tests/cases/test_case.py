"""Ids recreate their case exactly, and their case recreates its arguments bit for bit."""

from __future__ import annotations

import hashlib
import re
import subprocess
import sys
from typing import Any

import pytest
import torch

from moetail.conformance.cases import CALLED, SOURCES, Case
from moetail.conformance.cases.case import options_of
from moetail.conformance.cases.tensors import tensors_in
from moetail.spec import operation

FINALIZE = "beam_moe_finalize"
GATHER = "beam_moe_finalize_gather_norm_residual_norm"
ALLREDUCE = "beam_finalize_allreduce_norm_residual_norm"


def fingerprint(arguments: dict[str, Any]) -> str:
    digest = hashlib.sha256()
    for _, tensor in tensors_in(arguments):
        digest.update(f"{tensor.dtype}{list(tensor.shape)}".encode())
        digest.update(tensor.reshape(-1).contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def test_id_reads_well() -> None:
    case = Case(FINALIZE, "normal", 3, 5, 8, 256, routed_scale=2.5)
    assert case.id == "beam_moe_finalize/normal/T5-K8-H256/seed:3+scale:2.5"
    assert Case.parse(case.id) == case
    assert Case(FINALIZE).id == "beam_moe_finalize/normal/T4-K2-H256"


def test_id_is_safe_for_shells_and_pytest() -> None:
    case = Case(
        ALLREDUCE,
        "moe",
        2**40,
        7,
        8,
        7168,
        ranks=8,
        model="deepseek-v3",
        scales=(0.5, -1e-9),
        routed_scale=1e30,
        next="affine",
        next_eps=1e-5,
        local=0.25,
        weights="bf16",
        poison="random",
        shared=True,
        tile=128,
    )
    assert re.fullmatch(r"[\w./:+-]+", case.id)
    assert Case.parse(case.id) == case


@pytest.mark.parametrize(
    ("text", "field"),
    [
        ("beam_moe_finalise/normal/T1-K1-H256", "operation"),
        ("beam_moe_finalize/nromal/T1-K1-H256", "source"),
        ("beam_moe_finalize/normal/T1-K1", "sizes"),
        ("beam_moe_finalize/normal/Tx-K1-H256", "tokens"),
        ("beam_moe_finalize/normal/T1-K33-H256", "top_k"),
        ("beam_moe_finalize/normal/T1-K1-H257", "hidden"),
        ("beam_moe_finalize/normal/T1-K1-H256/sede:1", "sede"),
        ("beam_moe_finalize/normal/T1-K1-H256/seed:x", "seed"),
        ("beam_moe_finalize/normal/T1-K1-H256/seed:1+seed:2", "seed"),
        ("beam_moe_finalize/normal/T1-K1-H256/next:norm", "next"),
        ("beam_moe_finalize/normal/T1-K1-H256/post:yes", "post"),
        ("beam_moe_finalize/normal/T1-K1-H256/posteps:0.1", "post_eps"),
        ("beam_moe_finalize", "id"),
    ],
)
def test_a_bad_id_names_its_field(text: str, field: str) -> None:
    with pytest.raises(ValueError, match=rf"^{field}:"):
        Case.parse(text)


def _each_layout() -> list[Case]:
    """Each operation in each layout, with every tensor that it may take."""
    cases = []
    for target in map(operation, CALLED):
        options: dict[str, Any] = {"shared": True, "post": "affine", "next": "affine"}
        options = {name: options[name] for name in options_of(target.name) & options.keys()}
        options["top_k"] = 4 if target.has_routes else 1
        cases += [Case(target.name, layout=layout, **options) for layout in target.layouts]
    return [*cases, Case(FINALIZE, capacity=2), Case(ALLREDUCE, routed="finalized")]


@pytest.mark.parametrize("case", _each_layout(), ids=str)
def test_arguments_are_fresh_and_equal(case: Case) -> None:
    """Also where the values of a case are kept for later calls."""
    first = case.arguments()
    before = fingerprint(first)
    for _, tensor in tensors_in(first):
        tensor.zero_()
    assert fingerprint(first) != before
    assert fingerprint(case.arguments()) == before


def test_seeds_differ() -> None:
    assert fingerprint(Case(FINALIZE, seed=1).arguments()) != fingerprint(
        Case(FINALIZE, seed=2).arguments()
    )


@pytest.mark.parametrize("name", ["residual", "post_weight", "next_weight"])
@pytest.mark.parametrize("operation", [GATHER, ALLREDUCE])
def test_replicated_arguments_are_the_same_on_all_ranks(operation: str, name: str) -> None:
    case = Case(operation, tokens=5, ranks=3, post="affine", next="affine", scales=(0.5, 2.0))
    first, *others = [case.arguments(rank) for rank in range(3)]
    for other in others:
        assert torch.equal(first[name], other[name])
        assert first["scales"] == other["scales"]


def _every_source() -> list[Case]:
    cases = []
    for target in map(operation, CALLED):
        for source in SOURCES:
            try:
                cases.append(Case(target.name, source, 1, 3, 2 if target.has_routes else 1, 256))
            except ValueError:
                continue  # a source that this operation has no use for
    cases += [Case(name, "moe", 1, 5, ranks=3) for name in (GATHER, ALLREDUCE)]
    return cases


def test_the_same_bits_in_another_process() -> None:
    cases = _every_source()
    here = {case.id: fingerprint(case.arguments(case.ranks - 1)) for case in cases}
    program = (
        "import sys, torch; torch.set_num_threads(1)\n"
        "from moetail.conformance.cases import Case\n"
        f"import importlib.util as u; s = u.spec_from_file_location('t', {__file__!r})\n"
        "m = u.module_from_spec(s); s.loader.exec_module(m)\n"
        "for id in sys.stdin.read().split():\n"
        "    case = Case.parse(id)\n"
        "    print(id, m.fingerprint(case.arguments(case.ranks - 1)))\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", program],
        input="\n".join(here),
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    there = dict(line.split() for line in run.stdout.splitlines())
    assert there == here


@pytest.mark.parametrize("case", _every_source(), ids=str)
def test_zero_tokens_and_many(case: Case) -> None:
    for tokens in (0, 1, 9):
        assert case.replace(tokens=tokens).arguments()


def test_elements_order_cases_by_size() -> None:
    small, large = Case(FINALIZE, tokens=1), Case(FINALIZE, tokens=2)
    assert small.elements < large.elements


def test_wrapping_does_not_change_values() -> None:
    case = Case(FINALIZE, tokens=3, capacity=0)
    roomy = case.replace(capacity=3, poison="huge")
    assert torch.equal(case.arguments()["expert_outputs"], roomy.arguments()["expert_outputs"][:3])
