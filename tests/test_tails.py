"""Sizes below, at and above every border of a tile, each axis by itself and then in random combinations.

The borders are read from show_config() for the level in force, so that retuning does not untest a tail.
"""

import numpy as np
import pytest
from conftest import DTYPES, check, qkv, tiles

MASK_TILE, MASK_ROWS = 8, 16  # keys that a panel drops at once; rows whose bits of a bool mask lie in one word
COLUMN_VECTORS = (1, 2, 3, 4)  # columns of a tile of the output, in vectors
PANELS = (1, 2, 3, 4)  # panels that share a packed key block


def around(*borders):
    """Each border, one below and one above."""
    return sorted({n for border in borders for n in (border - 1, border, border + 1) if n > 0})


def query_counts(t):
    return around(1, t["lanes"], t["few_rows"], MASK_ROWS, t["row_tile"], *(n * t["panel"] for n in PANELS))


def key_counts(t):
    tile, block, split = t["key_tile"], t["key_block"], t["key_split"]
    return around(1, 2, 4, tile, 2 * tile, t["lanes"], MASK_TILE, block, 2 * block, split, split + block, 2 * split)


def widths(t):
    return around(1, t["lanes"], 2 * t["lanes"], 3 * t["lanes"], 64)


def value_widths(t):
    return around(*(n * t["lanes"] for n in COLUMN_VECTORS), 5 * t["lanes"], 8 * t["lanes"], 64)


def masks(rng, queries, keys, dtype):
    """None, and masks that leave whole tiles empty, full and partial."""
    tile = rng.random((-(-queries // MASK_ROWS), -(-keys // MASK_TILE)))
    coarse = tile.repeat(MASK_ROWS, 0).repeat(MASK_TILE, 1)[:queries, :keys]
    allowed = (coarse < 0.4) | ((coarse < 0.7) & (rng.random((queries, keys)) < 0.5))
    bias = np.where(allowed, rng.standard_normal((queries, keys)), -np.inf).astype(dtype)
    return {"none": None, "bool": allowed, "float": bias}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["none", "bool", "float"])
@pytest.mark.parametrize("group", [1, 3])
def test_queries(isa, rng, dtype, kind, group):
    for queries in query_counts(tiles(dtype)):
        arrays = qkv(rng, 1, group, queries, 19, width=5, kv_heads=1, dtype=dtype)
        check(*arrays, masks(rng, queries, 19, dtype)[kind], is_causal="lower_right", enable_gqa=True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["none", "bool", "float"])
@pytest.mark.parametrize("queries", [1, 3, 9, 17])
def test_keys(isa, rng, dtype, kind, queries):
    for keys in key_counts(tiles(dtype)):
        arrays = qkv(rng, 1, 1, queries, keys, width=5, dtype=dtype)
        check(*arrays, masks(rng, queries, keys, dtype)[kind])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("queries", [1, 9, 17])
def test_every_small_number_of_keys(isa, rng, dtype, queries):
    for keys in range(1, 71):
        check(*qkv(rng, 1, 1, queries, keys, width=3, dtype=dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("queries", [1, 4, 17])
def test_widths(isa, rng, dtype, queries):
    for width in widths(tiles(dtype)):
        check(*qkv(rng, 1, 2, queries, 21, width=width, value_width=3, dtype=dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("queries", [1, 4, 17])
def test_value_widths(isa, rng, dtype, queries):
    for width in value_widths(tiles(dtype)):
        check(*qkv(rng, 1, 2, queries, 21, width=3, value_width=width, dtype=dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("queries", [2, 33])
def test_lengths(isa, rng, dtype, queries):
    """A length at every border, all in one batch, and the same lengths mixed among the queries."""
    t = tiles(dtype)
    keys = t["key_split"] + t["key_block"] + 3
    lengths = np.array([0, *(n for n in key_counts(t) if n < keys), keys])
    arrays = qkv(rng, len(lengths), 1, queries, keys, width=4, dtype=dtype)
    check(*arrays, valid_lens=lengths)
    check(*(x[:3] for x in arrays), valid_lens=rng.choice(lengths, (3, queries)))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("queries", [2, 33])
def test_offsets(isa, rng, dtype, queries):
    """The causal border of some query at every border of a tile, before the first key and behind the last."""
    t = tiles(dtype)
    keys = t["key_split"] + t["key_block"] + 3
    borders = np.array([n for n in key_counts(t) if n < keys])
    offsets = np.concatenate([[-queries - 1, -queries, -1, 0, keys, keys + 5], borders - 1, borders - queries])
    arrays = qkv(rng, len(offsets), 1, queries, keys, width=4, dtype=dtype)
    check(*arrays, is_causal=True, q_offset=offsets)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", [(37, 101), (101, 37), (97, 300), (300, 97), (49, 1030)], ids=str)
@pytest.mark.parametrize("causal", ["upper_left", "lower_right"])
def test_the_diagonal_crosses_tiles_at_odd_places(isa, rng, dtype, sizes, causal):
    check(*qkv(rng, 1, 2, *sizes, width=8, kv_heads=1, dtype=dtype), is_causal=causal, enable_gqa=True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["bool", "float"])
@pytest.mark.parametrize("queries", [1, 20])
def test_the_first_seen_key_lies_anywhere(isa, rng, dtype, kind, queries):
    """Blocks and tiles in front that hide everything from a row: minus infinity minus itself is NaN."""
    t = tiles(dtype)
    keys = t["key_split"] + t["key_block"] + 3
    firsts = [0, *(n for n in key_counts(t) if n < keys), keys]
    allowed = np.arange(keys) >= np.resize(firsts, (len(firsts), 1, queries))[..., None]
    mask = allowed if kind == "bool" else np.where(allowed, 0, -np.inf).astype(dtype)
    check(*qkv(rng, len(firsts), 1, queries, keys, width=4, dtype=dtype), mask)
    check(*qkv(rng, len(firsts), 1, queries, keys, width=4, dtype=dtype), mask[..., ::-1])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("part", range(4))
def test_combinations(isa, rng, dtype, part):
    t = tiles(dtype)
    for _ in range(12):
        queries, keys = int(rng.choice(query_counts(t))), int(rng.choice(key_counts(t)))
        group = int(rng.choice([1, 2, 5]))
        query, key, value = qkv(
            rng, 2, 2 * group, queries, keys, int(rng.choice(widths(t))), 2, int(rng.choice(value_widths(t))), dtype
        )
        if queries * keys > 40_000:
            query, key, value = query[:1, :group], key[:1, :1], value[:1, :1]
        options = {
            "valid_lens": [None, rng.integers(0, keys + 1, len(query))][rng.integers(2)],
            "is_causal": [False, "upper_left", "lower_right"][rng.integers(3)],
            "scale": [None, -0.3, 0.7][rng.integers(3)],
        }
        mask = masks(rng, queries, keys, dtype)[str(rng.choice(["none", "bool", "float"]))]
        check(query, key, value, mask, enable_gqa=True, **options)
