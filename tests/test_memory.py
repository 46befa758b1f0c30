"""Memory: nothing outside the arrays is read or written, nothing leaks, scores are never held, offsets are 64-bit."""

import gc
import os
import subprocess
import sys
import tracemalloc

import numpy as np
import pytest
from conftest import DTYPES, draw, peak, qkv, tiles

import mha_fast
from bench.cases import placed

DTYPE = pytest.mark.parametrize("dtype", DTYPES)
KERNELS = pytest.mark.parametrize("queries", [1, 3, 21])


# ---------------------------------------------------------------- guard bands

PAD = 5


def banded(array, fill):
    """The same numbers as a slice of a larger array that is filled with something else; the slice and the whole."""
    whole = np.full([n + 2 * PAD for n in array.shape], fill, array.dtype)
    inner = whole[(slice(PAD, -PAD),) * array.ndim]
    inner[...] = array
    return inner, whole


def in_line(array, fill):
    """Contiguous, with bands before and behind."""
    whole = np.full(array.size + 2 * 64, fill, array.dtype)
    inner = whole[64:-64].reshape(array.shape)
    inner[...] = array
    return inner, whole


@DTYPE
@KERNELS
@pytest.mark.parametrize("band", [banded, in_line])
@pytest.mark.parametrize("mask", ["none", "bool", "float"])
def test_bands_around_every_array_stay_and_do_not_leak(isa, attend, rng, dtype, queries, band, mask):
    lanes = tiles(dtype)["lanes"]
    for keys, width, value_width in ((1, 1, 1), (19, lanes + 1, lanes + 1), (300, 2 * lanes - 1, 3 * lanes + 2)):
        arrays = dict(
            zip(
                ("query", "key", "value"),
                qkv(rng, 2, 2, queries, keys, width, 1, value_width, dtype),
                strict=True,
            )
        )
        seen = rng.random((2, 2, queries, keys)) < 0.7
        if mask == "bool":
            arrays["attn_mask"] = seen
        elif mask == "float":
            arrays["attn_mask"] = np.where(seen, draw(rng, *seen.shape), -np.inf).astype(dtype)
        arrays["valid_lens"] = rng.integers(0, keys + 1, (2, queries))
        arrays["q_offset"] = rng.integers(0, keys, 2)
        want = attend(**arrays, enable_gqa=True, is_causal=True)
        fills = {"attn_mask": True if mask == "bool" else np.nan, "valid_lens": 2**40, "q_offset": 2**40}
        inputs = {name: band(array, fills.get(name, np.nan)) for name, array in arrays.items()}
        before = {name: whole.tobytes() for name, (_, whole) in inputs.items()}
        out, out_whole = band(np.zeros_like(want), 12345.0)
        views = {name: inner for name, (inner, _) in inputs.items()}
        assert attend(**views, enable_gqa=True, is_causal=True, out=out) is out
        assert np.array_equal(out, want)
        assert {name: whole.tobytes() for name, (_, whole) in inputs.items()} == before
        out[...] = 12345.0
        assert (out_whole == 12345.0).all(), "written beside out"


@DTYPE
@KERNELS
@pytest.mark.parametrize("step", [-2, 2, 3])
def test_gaps_between_the_elements_of_out_stay(isa, attend, rng, dtype, queries, step):
    query, key, value = qkv(rng, 1, 2, queries, 40, 9, value_width=35, dtype=dtype)
    want = attend(query, key, value)
    whole = np.full([n * abs(step) for n in want.shape], 12345.0, dtype)
    out = whole[(slice(None, None, step),) * 4]
    attend(query, key, value, out=out)
    assert np.array_equal(out, want)
    out[...] = 12345.0
    assert (whole == 12345.0).all()


# Pages that may not be touched right before or right behind every array: a stray access ends the process.
PROTECTED = """
import ctypes, mmap, itertools, sys
import numpy as np
import mha_fast
from mha_fast import _config

page = mmap.PAGESIZE
libc = ctypes.CDLL(None, use_errno=True)

def place(array, behind):
    '''A copy that ends right before, or begins right after, a page without access.'''
    size = -(-max(array.nbytes, 1) // page) * page
    memory = mmap.mmap(-1, size + page)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    guard = address + size if behind else address
    start = size - array.nbytes if behind else page
    copy = np.frombuffer(memory, array.dtype, array.size, start).reshape(array.shape)
    copy[...] = array
    assert libc.mprotect(ctypes.c_void_p(guard), ctypes.c_size_t(page), 0) == 0, ctypes.get_errno()
    return copy

rng = np.random.default_rng(0)
level = sys.argv[1]
_config.set_level(level)
mha_fast.set_num_threads(1)
for dtype in ("float32", "float64"):
    lanes = mha_fast.show_config()["tiles"][dtype]["lanes"]
    sizes = [(1, 1, 1, 1), (2, 3, lanes + 1, 1), (1, 17, 3, lanes - 1 or 1), (9, 9, lanes, lanes + 1)]
    sizes += [(21, 31, 2 * lanes - 1, 2 * lanes), (50, 261, 5, 3 * lanes + 1), (3, 1027, 7, 4 * lanes - 1 or 3)]
    for (queries, keys, width, value_width), kind, behind in itertools.product(sizes, range(4), (True, False)):
        print(level, dtype, queries, keys, width, value_width, kind, behind, flush=True)
        shapes = ((1, 2, queries, width), (1, 1, keys, width), (1, 1, keys, value_width))
        arrays = [place(rng.standard_normal(shape).astype(dtype), behind) for shape in shapes]
        masks = [None, rng.random((queries, keys)) < 0.5, rng.standard_normal((queries, keys)).astype(dtype)]
        masks.append(rng.standard_normal(keys).astype("float64"))
        mask = None if kind == 0 else place(masks[kind], behind)
        lengths = place(np.array([keys]), behind)
        out = place(np.zeros((1, 2, queries, value_width), dtype), behind)
        options = {"enable_gqa": True, "valid_lens": lengths, "out": out}
        got, lse, weights = mha_fast.scaled_dot_product_attention(
            *arrays, mask, **options, return_lse=True, return_weights=True)
        options.pop("out")
        copies = [x.copy() for x in arrays]
        want = mha_fast.scaled_dot_product_attention(*copies, mask, **options)
        assert np.array_equal(got, want)
print("done")
"""


@pytest.mark.skipif(sys.platform != "linux", reason="uses mprotect of Linux")
def test_pages_around_every_array_are_not_touched(isa):
    done = subprocess.run(
        [sys.executable, "-c", PROTECTED, isa],
        env=os.environ | {"PYTHONPATH": os.path.dirname(os.path.dirname(os.path.abspath(mha_fast.__file__)))},
        capture_output=True,
        text=True,
        timeout=120,
    )
    lines = done.stdout.splitlines()
    assert done.returncode == 0 and lines[-1] == "done", f"status {done.returncode} at {lines[-1:]}: {done.stderr}"


# ---------------------------------------------------------------- leaks and peaks


def traced_growth(call, repeats):
    for _ in range(20):
        call()
    gc.collect()
    tracemalloc.start()
    try:
        call()
        before = tracemalloc.get_traced_memory()[0]
        for _ in range(repeats):
            call()
        gc.collect()
        return tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()


def failing(call):
    def run():
        try:
            call()
        except (TypeError, ValueError):
            return
        raise AssertionError("no error")

    return run


def leak_cases():
    attend = mha_fast.scaled_dot_product_attention
    x = np.ones((2, 2, 9, 8), np.float32)
    layer = mha_fast.MultiHeadAttention(16, 2, rng=0)
    rows = np.ones((2, 9, 16))
    return {
        "plain": lambda: attend(x, x, x),
        "lse": lambda: attend(x, x, x, return_lse=True),
        "mask and lengths": lambda: attend(x, x, x, np.ones((9, 9), bool), valid_lens=np.array([3, 9])),
        "everything": lambda: attend(
            x.astype(">f4"), x, x, np.ones(9, "f2"), valid_lens=[3, 9], return_weights=True, return_lse=True
        ),
        "out": lambda: attend(x, x, x, out=np.empty_like(x)),
        "threads": lambda: attend(x, x, x, num_threads=2),
        "layer": lambda: layer(rows, rows, rows, need_weights=True),
        "wrong shape": failing(lambda: attend(x, x[:, :1], x)),
        "wrong dtype": failing(lambda: attend(x, x.astype(complex), x)),
        "wrong mask": failing(lambda: attend(x, x, x, np.ones((9, 9), int))),
        "wrong out": failing(lambda: attend(x, x, x, out=x)),
    }


@pytest.mark.parametrize("case", leak_cases())
def test_nothing_stays_behind(case):
    """A leak of one object or workspace a call would be 30 kB at least."""
    assert traced_growth(leak_cases()[case], 1500) < 15_000


LONG = 4096
PEAKS = {
    "plain": {},
    "lse": {"return_lse": True},
    "causal": {"is_causal": True},
    "lengths": {"valid_lens": np.array([LONG - 3])},
    "bool mask of keys": {"attn_mask": np.ones(LONG, bool)},
    "float mask of keys": {"attn_mask": np.zeros(LONG, np.float32)},
    "float64 mask of rows": {"attn_mask": np.zeros((LONG, 1))},
    "float16 mask of keys": {"attn_mask": np.zeros((1, 1, 1, LONG), np.float16)},
    "two threads": {"num_threads": 2},
}


@pytest.mark.parametrize("case", PEAKS)
@pytest.mark.parametrize("queries", [2, LONG])
def test_the_scores_are_never_held(attend, case, queries):
    """4096 x 4096 scores of two heads would be 128 MiB; the workspace of a thread is some tiles."""
    query = np.ones((1, 2, queries, 8), np.float32)
    key = np.ones((1, 2, LONG, 8), np.float32)
    options = dict(PEAKS[case])
    if queries != LONG and np.ndim(options.get("attn_mask")) == 2:
        options["attn_mask"] = options["attn_mask"][:queries]
    if queries != LONG and "is_causal" in options:
        options["is_causal"] = "lower_right"
    assert peak(lambda: attend(query, key, key, **options)) < query.nbytes + 2_000_000


def test_the_workspace_grows_with_neither_batch_nor_keys(attend):
    """For one thread: the same tiles for 1 and for 64 heads, for 512 and for 8192 keys, all at a cache line."""

    def extra(heads, keys):
        query, key = np.ones((heads, 64, 16), np.float32), placed((heads, keys, 16), np.float32, 0)
        key[...] = 1
        return peak(lambda: attend(query, key, key, num_threads=1)) - query.nbytes

    base = extra(1, 512)
    assert abs(extra(64, 512) - base) < 5_000
    assert abs(extra(1, 8192) - base) < 5_000


def test_broadcast_inputs_are_not_copied(attend):
    """64 entries over one key and one mask: 64 copies would be 33 MB."""
    query = np.ones((64, 1, 4, 16), np.float32)
    key = np.ones((1, 1, 8192, 16), np.float32)
    mask = np.broadcast_to(np.ones(8192, bool), (64, 1, 4, 8192))
    assert peak(lambda: attend(query, key, key, mask)) < 3_000_000


# ---------------------------------------------------------------- 64-bit offsets


@pytest.fixture(scope="module")
def sparse(tmp_path_factory):
    """2^31 float32 elements and some more, in a file that is nearly all hole."""
    path, elements = tmp_path_factory.mktemp("sparse") / "hole", 2**31 + 2**18
    try:
        with open(path, "wb") as file:
            file.truncate(4 * elements)
        memory = np.memmap(path, np.float32, "r+", shape=(elements,))
    except (OSError, ValueError, OverflowError) as error:
        pytest.skip(f"no sparse file of {4 * elements} bytes can be mapped here: {error}")
    yield np.asarray(memory)
    del memory
    gc.collect()
    path.unlink()


# (heads, kv heads, queries, keys): a stride beyond 2^31 where an axis has two entries, else a product of that size; and
# both kernels.
FAR = [(3, 3, 3, 9), (3, 3, 12, 9), (2, 2, 2, 2), (12, 2, 2, 2)]


@pytest.mark.skipif(sys.maxsize < 2**40, reason="addresses have 32 bits")
@pytest.mark.parametrize("which", ["query", "key", "value", "attn_mask", "out"])
@pytest.mark.parametrize("axis", [0, 1, 2])
@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("sizes", FAR, ids=str)
def test_strides_that_32_bits_do_not_hold(isa, attend, rng, sparse, which, axis, sign, sizes):
    """Entries, heads or rows so far apart that the last lies beyond 2^31 elements."""
    heads, kv_heads, queries, keys = sizes
    query, key, value = qkv(rng, 2, heads, queries, keys, 5, kv_heads, dtype="float32")
    arrays = {"query": query, "key": key, "value": value}
    arrays["attn_mask"] = draw(rng, 2, heads, queries, keys, dtype="float32")
    want = attend(**arrays, enable_gqa=True)
    array = want if which == "out" else arrays[which]
    step = 2**31 // (array.shape[axis] - 1) + 16 * array.size
    assert step * (array.shape[axis] - 1) + array.size < sparse.size
    strides = list(array.strides)
    strides[axis] = 4 * step
    far = np.lib.stride_tricks.as_strided(sparse, array.shape, strides)
    if sign < 0:
        far = np.flip(far, axis)
    if which == "out":
        attend(**arrays, enable_gqa=True, out=far)
        got = far
    else:
        far[...] = array
        got = attend(**arrays | {which: far}, enable_gqa=True)
    assert np.array_equal(got, want)


def test_a_depth_beyond_the_address_space_is_refused():
    """Sizes whose workspace overflows: an error, whatever the strides make of them."""
    for depth in (2**50, (2**64 // 260 + 64) // 64 * 64, 2**61):
        one = np.zeros((1, 1, 1), np.float32)
        try:
            wide = np.broadcast_to(one, (1, 1, depth))
        except ValueError:  # more than NumPy can describe
            continue
        with pytest.raises((MemoryError, ValueError)):
            mha_fast.scaled_dot_product_attention(wide, wide, one)
        with pytest.raises((MemoryError, ValueError)):
            mha_fast.scaled_dot_product_attention(one, one, wide)
