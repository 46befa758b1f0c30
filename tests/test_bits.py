"""The same-bits promise: within a level a row's result does not depend on threads, runs, batch, other rows or memory.

It holds among calls of up to `few_rows` rows (queries times heads of the group) and among the rest, not between both.
"""

import numpy as np
import pytest
from conftest import CONFIG, DTYPES, HALVES, draw, qkv, tiles

FEW_ROWS = CONFIG["few_rows"]
THREADS = (2, 3, 7)
OPTIONS = {"return_lse": True, "return_weights": True}
DTYPE = pytest.mark.parametrize("dtype", DTYPES + HALVES)
# Either family: one row, and some.
FAMILIES = pytest.mark.parametrize("queries", [1, FEW_ROWS, FEW_ROWS + 1, 60])


def same(got, want):
    assert len(got) == len(want)
    for name, g, w in zip(("out", "lse", "weights"), got, want, strict=False):
        assert np.array_equal(g, w, equal_nan=True), f"{name}: other bits in {np.count_nonzero(g != w)} places"


def rows(results, which):
    return [r[:, :, which] for r in results]


def features(rng, queries, keys, dtype, heads=1):
    mask = rng.random((queries, keys)) < 0.8
    return {
        "plain": {},
        "bool mask": {"attn_mask": mask},
        "float mask": {"attn_mask": np.where(mask, draw(rng, queries, keys), -np.inf).astype(dtype)},
        "lengths": {"valid_lens": rng.integers(0, keys + 1, (2, queries))},
        "causal": {"is_causal": "lower_right"},
        "window": {"q_offset": keys - queries, "window_size": (270, 3)},
        "causal window": {"is_causal": "lower_right", "window_size": (17, -1)},
        "rules": {
            "q_offset": keys - queries,
            "softcap": 2.0,
            "alibi_slopes": draw(rng, heads, dtype=dtype),
            "sinks": draw(rng, heads, dtype=dtype),
        },
        "all": {
            "attn_mask": mask,
            "valid_lens": rng.integers(keys // 2, keys + 1, (2, queries)),
            "q_offset": keys // 2,
            "window_size": (300, 260),
            "softcap": 2.0,
            "alibi_slopes": draw(rng, heads, dtype=dtype),
            "sinks": draw(rng, heads, dtype=dtype),
        },
    }


FEATURES = pytest.mark.parametrize("feature", features(np.random.default_rng(0), 1, 1, "float32"))


# ---------------------------------------------------------------- threads and runs


@DTYPE
@FAMILIES
@FEATURES
def test_for_any_number_of_threads(isa, attend, rng, dtype, queries, feature):
    """2 x 2 heads over two splits of the keys: with several threads the splits are tasks of their own."""
    keys = CONFIG["key_split"] + 300
    arrays = qkv(rng, 2, 2, queries, keys, 16, 2, 19, dtype)
    options = features(rng, queries, keys, dtype, 2)[feature] | OPTIONS
    want = attend(*arrays, **options, num_threads=1)
    for threads in THREADS:
        same(attend(*arrays, **options, num_threads=threads), want)


@DTYPE
@pytest.mark.parametrize("queries", [1, 3, 30])
def test_whether_or_not_splits_are_tasks(isa, attend, rng, dtype, queries):
    """One head among seven threads is split; the same head in a batch of 40 is not."""
    keys = 3 * CONFIG["key_split"] + 5
    query, key, value = qkv(rng, 40, 1, queries, keys, 8, dtype=dtype)
    many = attend(query, key, value, return_lse=True, num_threads=2)
    for b in (0, 39):
        one = slice(b, b + 1)
        alone = attend(query[one], key[one], value[one], return_lse=True, num_threads=7)
        same(alone, [r[one] for r in many])


@DTYPE
@FAMILIES
def test_from_run_to_run(isa, attend, rng, dtype, queries):
    """Also when memory comes back from other calls with other contents."""
    arrays = qkv(rng, 1, 3, queries, 700, 24, 1, 20, dtype)
    want = attend(*arrays, enable_gqa=True, **OPTIONS, num_threads=3)
    for _ in range(3):
        attend(*qkv(rng, 1, 3, queries, 700, 24, 1, 20, dtype), enable_gqa=True, num_threads=3)
        same(attend(*(x.copy() for x in arrays), enable_gqa=True, **OPTIONS, num_threads=3), want)


# ---------------------------------------------------------------- batch and other rows


@DTYPE
@FAMILIES
@FEATURES
def test_for_an_entry_in_any_batch(isa, attend, rng, dtype, queries, feature):
    keys = 600
    arrays = qkv(rng, 2, 4, queries, keys, 16, 2, 12, dtype)
    options = features(rng, queries, keys, dtype, 4)[feature] | OPTIONS | {"enable_gqa": True}
    got = attend(*arrays, **options)
    order = [1, 0, 0, 1, 1]
    if "valid_lens" in options:
        options["valid_lens"] = options["valid_lens"][order]
    same(attend(*(x[order] for x in arrays), **options), [r[order] for r in got])


@DTYPE
@FEATURES
@pytest.mark.parametrize("group", [1, 2, 3])
def test_whatever_the_other_rows_in_the_family_of_few(isa, attend, rng, dtype, feature, group):
    queries, keys = FEW_ROWS // group, 1300
    query, key, value = qkv(rng, 2, group, queries, keys, 21, 1, 35, dtype)
    options = features(rng, queries, keys, dtype, group)[feature]
    want = attend(query, key, value, **options, **OPTIONS, enable_gqa=True)
    for first, last in ((0, 1), (0, queries), (queries - 1, queries), (1, queries)):
        part = slice(first, last)
        got = attend(query[:, :, part], key, value, **of_rows(options, part, keys, queries), **OPTIONS, enable_gqa=True)
        same(got, rows(want, part))


@DTYPE
@FEATURES
@pytest.mark.parametrize("group", [1, 3])
def test_whatever_the_other_rows_among_the_rest(isa, attend, rng, dtype, feature, group):
    """A row's place in its panel, its tile and its task changes with every part."""
    t = tiles(dtype)
    queries, keys = 4 * t["panel"] + 7, 1300
    query, key, value = qkv(rng, 2, group, queries, keys, 21, 1, 35, dtype)
    options = features(rng, queries, keys, dtype, group)[feature]
    want = attend(query, key, value, **options, **OPTIONS, enable_gqa=True)
    least = FEW_ROWS // group + 1
    for first, count in (
        (0, least),
        (5, least + 1),
        (queries - least, least),
        (t["panel"] - 2, t["panel"]),
        (1, queries),
    ):
        part = slice(first, first + count)
        got = attend(query[:, :, part], key, value, **of_rows(options, part, keys, queries), **OPTIONS, enable_gqa=True)
        same(got, rows(want, part))


def of_rows(options, part, keys, queries):
    """The options of a call with these rows alone."""
    cut = dict(options)
    if "attn_mask" in cut:
        cut["attn_mask"] = cut["attn_mask"][part]
    if "valid_lens" in cut:
        cut["valid_lens"] = cut["valid_lens"][:, part]
    if "is_causal" in cut:
        cut |= {"is_causal": True, "q_offset": keys - queries}
    if "q_offset" in cut:
        cut["q_offset"] += part.start
    return cut


@DTYPE
@pytest.mark.parametrize("queries", [4, 50])
def test_whatever_values_the_other_rows_have(isa, attend, rng, dtype, queries):
    query, key, value = qkv(rng, 1, 2, queries, 300, 16, dtype=dtype)
    want = attend(query, key, value, **OPTIONS)
    query[:, :, 1:] = np.nan
    same(rows(attend(query, key, value, **OPTIONS), slice(0, 1)), rows(want, slice(0, 1)))
    query[:, :, 1:] = 1e4
    same(rows(attend(query, key, value, **OPTIONS), slice(0, 1)), rows(want, slice(0, 1)))


@DTYPE
@pytest.mark.parametrize("queries", [(1, 2), (9, 18)])
def test_a_head_alone_or_in_a_group(isa, attend, rng, dtype, queries):
    """Heads of a group share a panel; within the family that changes nothing."""
    query, key, value = qkv(rng, 1, 4, queries[0], 700, 16, 1, dtype=dtype)
    want = attend(query, key, value, enable_gqa=True, return_lse=True)
    for h in range(4):
        one = slice(h, h + 1)
        same(attend(query[:, one], key, value, return_lse=True), [r[:, one] for r in want])


# ---------------------------------------------------------------- what is appended behind


@DTYPE
@FAMILIES
@pytest.mark.parametrize("keys", [1, 7, 250, 256, 1020, 1024, 1030])
def test_hidden_keys_behind_change_nothing(isa, attend, rng, dtype, queries, keys):
    more = keys + 1100
    query, key, value = qkv(rng, 1, 1, queries, more, 9, value_width=11, dtype=dtype)
    want = attend(query, key[:, :, :keys], value[:, :, :keys], return_lse=True)
    seen = np.arange(more) < keys
    for hiding in (
        {"valid_lens": [keys]},
        {"valid_lens": np.full((1, queries), keys)},
    ):
        same(attend(query, key, value, **hiding, return_lse=True, num_threads=3), want)
    masked = attend(query, key[:, :, :keys], value[:, :, :keys], np.ones((queries, keys), bool), return_lse=True)
    same(attend(query, key, value, np.tile(seen, (queries, 1)), return_lse=True, num_threads=3), masked)
    same(masked, want)


@DTYPE
@pytest.mark.parametrize("queries", [2, 40])
def test_rows_behind_change_nothing(isa, attend, rng, dtype, queries):
    """Padding queries appended to a batch, within the family."""
    query, key, value = qkv(rng, 1, 2, queries + 3, 270, 16, dtype=dtype)
    want = attend(query[:, :, :queries], key, value, return_lse=True)
    query[:, :, queries:] = np.nan
    same(rows(attend(query, key, value, return_lse=True), slice(0, queries)), want)


@DTYPE
@FAMILIES
def test_a_window_alone_or_in_a_longer_cache(isa, attend, rng, dtype, queries):
    """Blocks, splits and tiles before the window are left out, wherever the other rows' windows begin."""
    keys = 2 * CONFIG["key_split"] + 300
    query, key, value = qkv(rng, 1, 2, queries, keys, 16, dtype=dtype)
    for back in (0, 1, 15, 16, 40, 255, 256, 1023, 1024, keys):
        options = {"window_size": (back, 0), "q_offset": keys - queries}
        want = attend(query, key, value, **options, **OPTIONS)
        for threads in THREADS:
            same(attend(query, key, value, **options, **OPTIONS, num_threads=threads), want)
        seen = np.arange(keys) - np.arange(keys - queries, keys)[:, None]
        masked = attend(query, key, value, (seen >= -back) & (seen <= 0), **OPTIONS)
        same(masked, want)


@DTYPE
@FAMILIES
def test_no_window_no_cap_and_no_sink_change_nothing(isa, attend, rng, dtype, queries):
    query, key, value = qkv(rng, 1, 2, queries, 530, 16, dtype=dtype)
    want = attend(query, key, value, **OPTIONS)
    none = np.full(2, -np.inf, dtype)
    same(attend(query, key, value, sinks=none, **OPTIONS), want)
    same(attend(query, key, value, window_size=(10**9, 10**9), **OPTIONS), want)
    same(attend(query, key, value, alibi_slopes=np.zeros(2, dtype), **OPTIONS), want)


@DTYPE
@FAMILIES
def test_a_mask_that_hides_nothing_changes_nothing(isa, attend, rng, dtype, queries):
    query, key, value = qkv(rng, 1, 2, queries, 530, 16, dtype=dtype)
    want = attend(query, key, value, **OPTIONS)
    same(attend(query, key, value, np.ones((queries, 530), bool), **OPTIONS), want)
    same(attend(query, key, value, np.zeros(530, dtype), **OPTIONS), want)
    same(attend(query, key, value, valid_lens=[10**9], is_causal=True, q_offset=10**9, **OPTIONS), want)


# ---------------------------------------------------------------- memory


@DTYPE
@FAMILIES
def test_in_any_memory(isa, attend, rng, dtype, queries):
    """In place, packed for its strides, packed for its dtype's byte order: one arithmetic."""
    arrays = qkv(rng, 2, 2, queries, 530, 20, value_width=18, dtype=dtype)
    want = attend(*arrays, **OPTIONS)
    spread = [np.repeat(x, 2, axis=-1)[..., ::2] for x in arrays]
    same(attend(*spread, **OPTIONS), want)
    turned = [np.ascontiguousarray(x.swapaxes(1, 2)) for x in arrays]
    got = attend(*turned, layout="blhd", **OPTIONS)
    same([got[0].swapaxes(1, 2), *got[1:]], want)
    same(attend(*(np.asfortranarray(x) for x in arrays), **OPTIONS), want)
    same(attend(*(x.astype(x.dtype.newbyteorder()) for x in arrays), **OPTIONS), want)
    out = np.empty((*want[0].shape[:-1], 40), dtype)[..., 1:37:2]
    same(attend(*arrays, out=out, **OPTIONS), want)


@DTYPE
@pytest.mark.parametrize("width", [16, 32, 48])
@pytest.mark.parametrize("heads, queries", [(2, 3), (2, 60), (8, 200)])
def test_wherever_rows_begin(isa, attend, rng, dtype, heads, queries, width):
    """At every place in a cache line: whole vectors of values may lie across two of them; panels share a copy."""
    query, key, value = qkv(rng, 1, heads, queries, 300, 20, value_width=width, dtype=dtype)
    want = attend(query, key, value, **OPTIONS)
    memory = np.full(value.size + 128 // value.itemsize, np.nan, dtype)
    start = -memory.ctypes.data % 64 // value.itemsize
    for begin in range(start, start + 64 // value.itemsize):
        moved = memory[begin : begin + value.size].reshape(value.shape)
        moved[...] = value
        same(attend(query, key, moved, **OPTIONS), want)
        memory[...] = np.nan


@DTYPE
@pytest.mark.parametrize("queries", [1, 60])
def test_rows_far_apart(isa, attend, rng, dtype, queries):
    """Rows at least 2 KiB apart of 4096 and more keys are copied block by block."""
    keys = 4100
    query, key, value = qkv(rng, 1, 1, queries, keys, 16, dtype=dtype)
    memory = np.zeros((keys, 2, 2048 // key.itemsize), dtype)
    far = memory[None, None, :, 0, :16], memory[None, None, :, 1, :16]
    far[0][...], far[1][...] = key, value
    same(attend(query, *far, return_lse=True), attend(query, key, value, return_lse=True))


@pytest.mark.parametrize("queries", [1, 60])
@pytest.mark.parametrize("which", [0, 1, 2])
def test_a_wider_storage_of_the_same_numbers(isa, attend, rng, queries, which):
    """float32 numbers stored as float32 beside float64 ones, or as float64: the computation is one."""
    arrays = list(qkv(rng, 1, 2, queries, 300, 20, dtype="float32"))
    want = attend(*(x.astype("float64") for x in arrays), **OPTIONS)
    arrays[which] = arrays[which].astype("float64")
    same(attend(*arrays, **OPTIONS), want)
    mask = draw(rng, queries, 300, dtype="float32")
    same(attend(*arrays, mask, **OPTIONS), attend(*arrays, mask.astype("float64"), **OPTIONS))
