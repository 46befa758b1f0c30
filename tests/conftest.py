"""What the tests share: seeds, levels, input drawing, the oracle, the one tolerance table and the one comparison."""

import contextlib
import gc
import math
import tracemalloc
import zlib

import ml_dtypes
import numpy as np
import pytest
from threadpoolctl import threadpool_limits

import mha_fast
from mha_fast import _config, reference, sequences

DTYPES = ("float32", "float64")
# Names that NumPy knows: of the second from the import of ml_dtypes on.
HALVES = ("float16", np.dtype(ml_dtypes.bfloat16).name)
CONFIG = mha_fast.show_config()
LEVELS = CONFIG["levels_built"]
# What a test runs on that takes the fixture `attention`: the reference, and levels of the fast function.
IMPLEMENTATIONS = ("reference", *LEVELS)

# The tolerance table: the unit roundoff u of each compute dtype; `allowed` makes a bound of it.
#
# An output is sum(w v) / sum(w). To first order its error is at most (2 eps + sums) max|v|: eps is the relative error
# of a weight w = e^(s - m), which is the absolute error of s - m, and "sums" that of the two sums over keys.
# - s sums E products, with partial sums of about its own size, and then takes at most four more roundings (scale,
#   bias, difference to the maximum, log2(e)) of numbers of at most twice M, the largest |s|. Roundings are a random
#   walk, and n of them exceed 4 sqrt(n) u with a probability below 1e-3 (Higham & Mary 2019) even if every partial sum
#   were as large as M, which is one score of many here: eps <= u (4 sqrt(E) + 8) M, and 4 u of the exponential.
# - Sums start at 0 in every block of 256 keys: 4 sqrt(256) u each, and as much again for 16 blocks.
# Together u (2 (4 sqrt(E) + 8) M + 8 + 2 (64 + 16)). For unit normal inputs (E = 64, M = 5) that is 3e-5 of the
# largest value in float32, where one wrong key among a thousand makes 1e-3. How exact the kernels are beyond right or
# wrong is test_numerics' matter; this bound is wide enough for every level, tile and order of summation.
UNIT = {"float32": 2.0**-24, "float64": 2.0**-53}
# float16 and bfloat16 are computed in float32; one rounding of the result follows, at most u of it. Below the smallest
# normal number the step stays that number's: half a step, again.
STORED = {"float16": (2.0**-11, 2.0**-25), "bfloat16": (2.0**-8, 2.0**-134)}


def allowed(dtype, width, largest_score):
    """The error relative to the largest value; largest_score is that of all finite scores, bias included."""
    return UNIT[dtype] * (2 * (4 * math.sqrt(width) + 8) * largest_score + 168)


def rounding(dtype, largest):
    """The most that storing a result of at most this size in `dtype` adds to its error."""
    unit, step = STORED.get(dtype, (0.0, 0.0))
    return unit * largest + step


_seed = None


@pytest.fixture(scope="session", autouse=True)
def one_blas_thread():
    """The oracle's products are small; on a busy machine a second thread only waits."""
    with threadpool_limits(1, user_api="blas"):
        yield


@pytest.fixture
def rng(request):
    """A generator whose seed is a hash of the test's id, so it is the same in every run and order."""
    global _seed
    _seed = zlib.crc32(request.node.nodeid.rpartition("/")[2].encode())
    print(f"seed {_seed}")
    yield np.random.default_rng(_seed)
    _seed = None


@pytest.fixture(params=LEVELS)
def isa(request):
    """Each level of the build, in force for one test, on one thread unless the test asks for more.

    Threads are the matter of test_bits and test_threads; on a busy machine a parallel call may wait for a time slice.
    """
    with in_force(request.param):
        yield request.param


@contextlib.contextmanager
def in_force(level):
    if level not in CONFIG["levels_usable"]:
        pytest.skip(f"level {level} is built, but this CPU or system lacks it")
    before = mha_fast.show_config()["level"]
    _config.set_level(level)
    mha_fast.set_num_threads(1)
    try:
        yield
    finally:
        mha_fast.set_num_threads(None)
        _config.set_level(before)


@pytest.fixture(params=IMPLEMENTATIONS)
def attention(request):
    """`scaled_dot_product_attention` of the reference, then the fast one on each level."""
    if request.param == "reference":
        yield reference.scaled_dot_product_attention
        return
    with in_force(request.param):
        yield mha_fast.scaled_dot_product_attention


@pytest.fixture(params=IMPLEMENTATIONS)
def forms(request):
    """The module with the functions of sequences and caches: the reference, then the fast one on each level."""
    if request.param == "reference":
        yield reference
        return
    with in_force(request.param):
        yield sequences


@pytest.fixture
def attend():
    return mha_fast.scaled_dot_product_attention


def pair_rounding(*arrays):
    """What rounding the weights to bfloat16 adds, relative to the values: 0 where the level in force does not do it.

    Levels that multiply pairs do, where all arrays are bfloat16. Half a step of each weight; twice, for the sum is not
    rounded.
    """
    pairs = mha_fast.show_config()["level"].endswith("_bf16")
    return 2.0**-8 if pairs and all(x.dtype.name == "bfloat16" for x in arrays) else 0.0


def tiles(dtype):
    """Tile sizes of the level in force, with those that all levels share."""
    config = mha_fast.show_config()
    compute = "float32" if dtype in HALVES else dtype
    return config["tiles"][compute] | {name: config[name] for name in ("few_rows", "key_block", "key_split")}


def draw(rng, *shape, dtype="float64"):
    with np.errstate(under="ignore"):
        return rng.standard_normal(shape).astype(dtype)


def qkv(rng, batch=2, heads=2, queries=20, keys=30, width=24, kv_heads=None, value_width=None, dtype="float64"):
    """query, key and value, (batch, heads, length, width)."""
    kv_heads = kv_heads or heads
    value_width = width if value_width is None else value_width
    return (
        draw(rng, batch, heads, queries, width, dtype=dtype),
        draw(rng, batch, kv_heads, keys, width, dtype=dtype),
        draw(rng, batch, kv_heads, keys, value_width, dtype=dtype),
    )


def wide(x):
    """The same numbers in float64; what is no floating array stays."""
    floating = isinstance(x, np.ndarray) and (x.dtype.kind == "f" or x.dtype.name == "bfloat16")
    return x.astype(np.float64) if floating else x


def exact(query, key, value, attn_mask=None, **options):
    """The reference in float64 on the same numbers: out, lse, weights."""
    options.pop("num_threads", None)
    options.pop("out", None)
    options |= {"return_lse": True, "return_weights": True}
    return reference.scaled_dot_product_attention(wide(query), wide(key), wide(value), wide(attn_mask), **options)


def largest_score(query, key, scale=None, mask=None, layout="bhld"):
    """The largest finite |score| of all pairs, hidden ones too, with its bias."""
    query, key = (wide(np.asarray(x)) for x in (query, key))
    if layout == "blhd" and query.ndim > 2:
        query, key = query.swapaxes(-3, -2), key.swapaxes(-3, -2)
    width = query.shape[-1]
    scale = scale if scale is not None else 1 / math.sqrt(width or 1)
    if query.ndim > 2 and key.shape[-3] != query.shape[-3]:
        key = np.repeat(key, query.shape[-3] // key.shape[-3], axis=-3)
    with np.errstate(all="ignore"):
        scores = scale * (query @ key.swapaxes(-1, -2))
    bias = 0.0 if mask is None or mask.dtype == bool else largest(wide(mask))
    return largest(scores) + bias


def peak(call):
    """The most memory that NumPy and Python hold for a call, in bytes."""
    gc.collect()
    tracemalloc.start()
    try:
        call()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def largest(array):
    """The largest finite number, at least 1."""
    return float(np.abs(array[np.isfinite(array)]).max(initial=1.0))


def assert_close(got, want, limit, what="out"):
    """Every |got - want| <= limit; NaN and infinities exactly where they are wanted."""
    got, want = np.asarray(got), np.asarray(want, np.float64)
    where = f"{what}: isa {mha_fast.show_config()['level']}, dtype {got.dtype}, shape {got.shape}, seed {_seed}"
    assert got.shape == want.shape, f"{where}, expected shape {want.shape}"
    differs = np.isnan(got) != np.isnan(want)
    assert not differs.any(), f"{where}, NaN in one alone at {np.argwhere(differs)[:3].tolist()} of {differs.sum()}"
    finite = np.isfinite(want)
    differs = ~finite & ~np.isnan(want) & (got != want)
    assert not differs.any(), f"{where}, infinities differ at {np.argwhere(differs)[:3].tolist()}"
    if not finite.any():
        return
    error = np.zeros(want.shape)
    error[finite] = np.abs(got[finite].astype(np.float64) - want[finite])
    worst = np.unravel_index(np.argmax(error), error.shape)
    assert error[worst] <= limit, (
        f"{where}, at {tuple(map(int, worst))}: {got[worst]!r}, expected {want[worst]!r}, "
        f"error {error[worst]:.3g} > {limit:.3g}"
    )


def check(query, key, value, attn_mask=None, *, biggest=0.0, **options):
    """The fast call against the oracle: out, log-sum-exp and weights; then out alone, from the common path.

    `biggest` bounds what is added to the scores beside the mask.
    """
    call = mha_fast.scaled_dot_product_attention
    dtype = np.result_type(query, key, value).name
    score = largest_score(query, key, options.get("scale"), attn_mask, options.get("layout", "bhld"))
    bound = allowed(dtype, query.shape[-1], score + biggest)
    want = exact(query, key, value, attn_mask, **options)
    got = call(query, key, value, attn_mask, return_lse=True, return_weights=True, **options)
    # |lse| is at most M + log S, so its own rounding lies within the bound too.
    limits = {"out": bound * largest(value), "lse": bound, "weights": bound}
    for (name, limit), g, w in zip(limits.items(), got, want, strict=True):
        assert g.dtype == dtype, name
        assert_close(g, w, limit, name)
    alone = call(query, key, value, attn_mask, **options)
    assert np.array_equal(alone, got[0], equal_nan=True), "out alone has other bits than with lse and weights"
    return got[0]
