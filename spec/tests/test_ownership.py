"""OWN-1, against dealing tokens out one at a time."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moetail.spec import ContractError, owned_tokens, tokens_per_rank


@given(st.integers(0, 300), st.integers(1, 40))
def test_blocks_partition_the_tokens(num_tokens, world_size):
    slots = tokens_per_rank(num_tokens, world_size)
    assert slots == math.ceil(num_tokens / world_size)
    owner = {}
    for rank in range(world_size):
        tokens = owned_tokens(num_tokens, world_size, rank)
        assert 0 <= tokens.start <= tokens.stop <= num_tokens
        for token in tokens:
            assert token not in owner
            owner[token] = rank
    assert owner == {token: token // slots for token in range(num_tokens)}


@pytest.mark.parametrize(
    ("num_tokens", "world_size", "blocks"),
    [
        (0, 3, [range(0), range(0), range(0)]),
        (1, 3, [range(1), range(1, 1), range(1, 1)]),
        (5, 4, [range(2), range(2, 4), range(4, 5), range(5, 5)]),
        (9, 4, [range(3), range(3, 6), range(6, 9), range(9, 9)]),
        (8, 4, [range(2), range(2, 4), range(4, 6), range(6, 8)]),
    ],
)
def test_known_blocks(num_tokens, world_size, blocks):
    ours = [owned_tokens(num_tokens, world_size, rank) for rank in range(world_size)]
    assert [(block.start, block.stop) for block in ours] == [
        (block.start, block.stop) for block in blocks
    ]


@pytest.mark.parametrize(
    ("arguments", "argument"),
    [
        ((-1, 2, 0), "num_tokens"),
        ((3, 0, 0), "world_size"),
        ((3, -2, 0), "world_size"),
        ((3, 2, 2), "rank"),
        ((3, 2, -1), "rank"),
    ],
)
def test_refused(arguments, argument):
    with pytest.raises(ContractError) as refusal:
        owned_tokens(*arguments)
    assert refusal.value.rule == "OWN-1"
    assert refusal.value.argument == argument
