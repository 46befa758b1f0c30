"""The named cases: sizes, arrays, the work they hold and what bounds it. Benchmarks and tests share them."""

import math
from dataclasses import dataclass, replace

import numpy as np

DRAWN = 1048573
ITEM_BYTES = {"int8": 1, "float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}
# How far the outputs of two libraries may be apart, as a part of the largest one: far above the rounding of sums of
# some hundred products, far below what a wrong key makes; for half types four roundings of a result.
TOLERANCE = {"float16": 2.0**-9, "bfloat16": 2.0**-6, "float32": 2e-5, "float64": 1e-12}


def dtype_of(name):
    """The dtype of this name; ModuleNotFoundError for bfloat16 without ml_dtypes."""
    if name == "bfloat16":
        import ml_dtypes

        return np.dtype(ml_dtypes.bfloat16)
    return np.dtype(name)


def placed(shape, dtype, behind):
    """An array, its numbers not set, that begins this many bytes behind a cache line."""
    size = math.prod(shape) * np.dtype(dtype).itemsize
    memory = np.empty(size + 64, np.uint8)
    start = (behind - memory.ctypes.data) % 64
    return memory[start : start + size].view(dtype).reshape(shape)


@dataclass(frozen=True)
class Case:
    """One call. `num_kv_heads` 0 means as many as num_heads.

    Kinds: "attention"; "layer", self-attention with four projections; "cache", attention_with_kvcache on tokens that
    are there already; "packed", varlen_attention of `batch` sequences of `lengths()` queries and as many keys.
    """

    name: str
    batch: int
    num_heads: int
    q_len: int
    kv_len: int
    head_dim: int
    num_kv_heads: int = 0
    kind: str = "attention"
    dtype: str = "float32"
    is_causal: str = ""  # "", "upper_left", "lower_right"
    window: int = 0  # of a causal case: keys that a query sees, its own the last; 0: all
    ragged: bool = False  # lengths between an eighth and the whole of kv_len
    mask: str = ""  # "", "bool" (q_len, kv_len), "bias" (1, num_heads, q_len, kv_len)
    softcap: float = 0.0
    alibi: bool = False
    layout: str = "bhld"
    cache: str = ""  # of kind "cache": dtype of the cache; "": dtype
    page: int = 0  # of kind "cache": tokens in a page; 0: contiguous
    level: str = ""  # the instruction set that mha_fast is told to use; "": its own choice
    threads: int = 0  # of every contestant; 0: those of the run

    @property
    def limit(self):
        """What bounds the fastest possible call: "call" (its overhead), "read" (memory) or "fma" (arithmetic)."""
        if self.flops() < 2e6:
            return "call"
        return "read" if self.q_len == 1 else "fma"

    @property
    def kv_heads(self):
        return self.num_kv_heads or self.num_heads

    @property
    def num_hiddens(self):
        return self.num_heads * self.head_dim

    @property
    def kv_dtype(self):
        return self.cache or self.dtype

    def lengths(self):
        """Keys of each batch element."""
        if not self.ragged:
            return np.full(self.batch, self.kv_len)
        return np.random.default_rng(7).integers(max(1, self.kv_len // 8), self.kv_len + 1, self.batch)

    def offset(self):
        """The position of query 0 among the keys."""
        return self.kv_len - self.q_len if self.is_causal == "lower_right" else 0

    def pairs(self):
        """Visible pairs of a query and a key, for one head."""
        lengths, positions = self.lengths()[:, None], np.arange(self.q_len) + self.offset()
        ends = np.broadcast_to(lengths, (self.batch, self.q_len))
        if self.is_causal:
            ends = np.clip(positions + 1, 0, lengths)
        seen = ends - np.clip(positions + 1 - self.window, 0, ends) if self.window else ends
        if self.kind == "packed":
            seen = np.where(positions < lengths, seen, 0)
        return float(seen.sum())

    def flops(self):
        """Multiplications and additions that the visible keys need."""
        projections = 4 * 2.0 * self.batch * self.q_len * self.num_hiddens**2 if self.kind == "layer" else 0.0
        return 4.0 * self.num_heads * self.head_dim * self.pairs() + projections

    def kv_bytes(self):
        """Bytes of the keys and values that somebody sees, each counted once."""
        return 2.0 * self.kv_heads * self.head_dim * ITEM_BYTES[self.kv_dtype] * float(self.lengths().sum())

    def peak(self, level):
        """The arithmetic that the limit counts: "dot", of pairs of bfloat16 numbers where a level has it, or "fma"."""
        return "dot" if self.dtype == "bfloat16" and level == "avx512_bf16" else "fma"

    def limit_seconds(self, peak_gflops, read_gbs):
        """The shortest time that the machine allows; peak_gflops is of float32, or of bfloat16 dot products."""
        peak = peak_gflops * (0.5 if self.dtype == "float64" else 1) * 1e9
        reading = self.kv_bytes() / (read_gbs * 1e9) if self.limit == "read" else 0.0
        return max(self.flops() / peak, reading)

    def arrays(self):
        """Inputs, weights and options of the call that `kind` names; only a layer has weights."""
        rng = np.random.default_rng(11)
        if self.kind == "layer":
            n = self.num_hiddens
            weights = {f"W_{x}": self.draw(rng, n, n) / self.scalar(math.sqrt(n)) for x in "qkvo"}
            weights |= {f"b_{x}": self.draw(rng, n) for x in "qkvo"}
            options = {"valid_lens": self.lengths()} if self.ragged else {}
            return (self.draw(rng, self.batch, self.q_len, n),), weights, options
        if self.kind == "cache":
            inputs, options = self.cache_arrays(rng)
        elif self.kind == "packed":
            inputs, options = self.packed_arrays(rng)
        else:
            inputs, options = self.attention_arrays(rng)
        if self.window:
            options["window_size"] = (self.window - 1, 0)
        if self.softcap:
            options["softcap"] = self.softcap
        if self.alibi:
            options["alibi_slopes"] = self.slopes()
        return inputs, {}, options

    def attention_arrays(self, rng):
        options = {}
        if self.ragged:
            options["valid_lens"] = self.lengths()
        if self.is_causal:
            options["is_causal"] = self.is_causal
        if self.kv_heads != self.num_heads:
            options["enable_gqa"] = True
        if self.layout != "bhld":
            options["layout"] = self.layout
        if self.mask == "bool":
            options["attn_mask"] = rng.random((self.q_len, self.kv_len)) > 0.3
        if self.mask == "bias":
            options["attn_mask"] = self.draw(rng, 1, self.num_heads, self.q_len, self.kv_len)
        sizes = [(self.num_heads, self.q_len), (self.kv_heads, self.kv_len), (self.kv_heads, self.kv_len)]
        inputs = [
            self.draw(rng, self.batch, *(size if self.layout == "bhld" else size[::-1]), self.head_dim)
            for size in sizes
        ]
        return tuple(inputs), options

    def packed_arrays(self, rng):
        starts = np.concatenate([[0], np.cumsum(self.lengths())])
        inputs = [self.draw(rng, starts[-1], heads, self.head_dim) for heads in (self.num_heads, *[self.kv_heads] * 2)]
        return tuple(inputs), {"cu_seqlens_q": starts, "enable_gqa": True, "is_causal": bool(self.is_causal)}

    def cache_arrays(self, rng):
        """A query, and caches with no room left; the pages of an entry are scattered."""
        options = {"cache_seqlens": self.lengths(), "is_causal": bool(self.is_causal)}
        tokens = (self.batch, self.kv_heads, self.kv_len)
        if self.page:
            pages = -(-self.kv_len // self.page)
            tokens = (self.batch * pages, self.kv_heads, self.page)
            options["block_table"] = rng.permutation(tokens[0]).reshape(self.batch, pages)
        query = self.draw(rng, self.batch, self.num_heads, self.q_len, self.head_dim)
        if self.cache == "int8":
            caches = [repeated(rng.integers(-127, 128, DRAWN, np.int8), *tokens, self.head_dim) for _ in "kv"]
            # Numbers up to 1 to 2, all tokens with scales of their own.
            options |= {f"{x}_scale": (rng.random(tokens, np.float32) + np.float32(1)) / np.float32(127) for x in "kv"}
        else:
            caches = [self.draw(rng, *tokens, self.head_dim, dtype=self.kv_dtype) for _ in "kv"]
        return (query, *caches), options

    def slopes(self):
        return np.exp2(-8 * np.arange(1, self.num_heads + 1) / self.num_heads).astype(np.float32)

    def visible(self, options):
        """(batch or 1, 1, queries or 1, keys) bool, False for all that is hidden; None where nothing is."""
        positions, keys = np.arange(self.q_len)[:, None] + self.offset(), np.arange(self.kv_len)
        visible = np.ones((1, 1, 1, self.kv_len), bool)
        if self.ragged:
            visible = visible & (keys < self.lengths()[:, None, None, None])
        if self.is_causal:
            visible = visible & (keys <= positions)
        if self.window:
            visible &= keys > positions - self.window
        if self.mask == "bool":
            visible = visible & options["attn_mask"]
        return None if visible.all() else visible

    def additive_mask(self, options):
        """All that hides or biases keys as one array to add to (batch, heads, q_len, kv_len) scores, or None."""
        visible, bias = self.visible(options), None
        if self.mask == "bias":
            bias = options["attn_mask"]
        if self.alibi:
            distance = np.abs(np.arange(self.q_len)[:, None] + self.offset() - np.arange(self.kv_len))
            bias = -self.slopes()[None, :, None, None] * distance.astype(np.float32)
        if visible is None:
            return bias
        return np.where(visible, self.scalar(0) if bias is None else bias, self.scalar(-np.inf))

    def scalar(self, x):
        """A number in the dtype of the computation."""
        return np.float64(x) if self.dtype == "float64" else np.float32(x)

    def draw(self, rng, *shape, dtype=None):
        """Normal numbers, for half types rounded from float32."""
        dtype = dtype or self.dtype
        drawn = np.float64 if dtype == "float64" else np.float32
        numbers = rng.standard_normal(min(math.prod(shape), DRAWN), dtype=drawn)
        return repeated(numbers.astype(dtype_of(dtype), copy=False), *shape)

    def small(self):
        """The same case at a size for tests."""
        q_len = min(self.q_len, 37)
        kv_len = q_len if self.q_len == self.kv_len else min(self.kv_len, 301)
        group = self.num_heads // self.kv_heads
        kv_heads = min(self.kv_heads, 2)
        return replace(
            self,
            batch=min(self.batch, 3),
            q_len=q_len,
            kv_len=kv_len,
            num_heads=kv_heads * group,
            num_kv_heads=kv_heads if self.num_kv_heads else 0,
            window=min(self.window, 11),
            page=min(self.page, 64),
        )


def repeated(numbers, *shape):
    """An array of these numbers, again and again: drawing as many would take longer than a call that reads them."""
    return np.resize(numbers, shape)


CASES = [
    Case("tiny-article", 2, 5, 4, 6, 20),
    Case("tiny-16", 1, 4, 16, 16, 64),
    Case("prefill-128-d64", 8, 12, 128, 128, 64),
    Case("prefill-512-d64", 8, 12, 512, 512, 64),
    Case("prefill-2048-d64", 1, 8, 2048, 2048, 64),
    Case("prefill-4096-d64", 1, 8, 4096, 4096, 64),
    Case("prefill-128-d128", 8, 8, 128, 128, 128),
    Case("prefill-512-d128", 8, 8, 512, 512, 128),
    Case("prefill-2048-d128", 1, 8, 2048, 2048, 128),
    Case("prefill-4096-d128", 1, 8, 4096, 4096, 128),
    *(Case(f"prefill-512-d{d}", 8, 12, 512, 512, d) for d in (20, 32, 33, 80, 96, 160, 256)),
    Case("prefill-512-blhd", 8, 12, 512, 512, 64, layout="blhd"),
    Case("prefill-512-f64", 4, 12, 512, 512, 64, dtype="float64"),
    Case("prefill-512-bf16", 8, 12, 512, 512, 64, dtype="bfloat16"),
    Case("prefill-2048-d128-f16", 1, 8, 2048, 2048, 128, dtype="float16"),
    Case("vit-197", 16, 12, 197, 197, 64),
    Case("cross-64x1500", 4, 8, 64, 1500, 64),
    Case("causal-512-d64", 8, 12, 512, 512, 64, is_causal="upper_left"),
    Case("causal-2048-d64", 1, 8, 2048, 2048, 64, is_causal="upper_left"),
    Case("causal-4096-d128", 1, 8, 4096, 4096, 128, is_causal="upper_left"),
    Case("causal-gqa-2048-d128", 1, 32, 2048, 2048, 128, num_kv_heads=8, is_causal="upper_left"),
    Case("causal-4096-d128-bf16", 1, 8, 4096, 4096, 128, dtype="bfloat16", is_causal="upper_left"),
    Case("window-256-16384", 1, 8, 16384, 16384, 64, is_causal="upper_left", window=256),
    Case("window-1024-8192", 1, 8, 8192, 8192, 64, is_causal="upper_left", window=1024),
    Case("chunk-256-of-4096", 1, 16, 256, 4096, 64, is_causal="lower_right"),
    Case("ragged-512", 8, 12, 512, 512, 64, ragged=True),
    Case("bool-mask-512", 8, 12, 512, 512, 64, mask="bool"),
    Case("bias-512", 8, 12, 512, 512, 64, mask="bias"),
    Case("softcap-512", 8, 12, 512, 512, 64, softcap=30.0),
    Case("alibi-512", 8, 12, 512, 512, 64, is_causal="upper_left", alibi=True),
    Case("varlen-512", 8, 12, 512, 512, 64, kind="packed", ragged=True),
    Case("decode-4096", 1, 32, 1, 4096, 128),
    Case("decode-4096-gqa", 4, 32, 1, 4096, 128, num_kv_heads=8),
    Case("decode-32768-gqa", 1, 32, 1, 32768, 128, num_kv_heads=8),
    Case("decode-32768-gqa-bf16", 1, 32, 1, 32768, 128, num_kv_heads=8, dtype="bfloat16"),
    Case("decode-32768-gqa-f16", 1, 32, 1, 32768, 128, num_kv_heads=8, dtype="float16"),
    Case("decode-mqa-16384-bf16", 4, 16, 1, 16384, 64, num_kv_heads=1, dtype="bfloat16"),
    Case("cache-bf16-gqa-32768", 1, 32, 1, 32768, 128, num_kv_heads=8, kind="cache", dtype="bfloat16"),
    Case("cache-int8-32768", 1, 32, 1, 32768, 128, kind="cache", cache="int8"),
    Case("cache-int8-gqa-32768", 1, 32, 1, 32768, 128, num_kv_heads=8, kind="cache", cache="int8"),
    Case("cache-paged-256", 1, 32, 1, 32768, 128, num_kv_heads=8, kind="cache", page=256),
    Case("cache-paged-16", 1, 32, 1, 32768, 128, num_kv_heads=8, kind="cache", page=16),
    Case("layer-article-f64", 2, 5, 4, 4, 20, kind="layer", dtype="float64"),
    Case("layer-minilm-32x64", 32, 12, 64, 64, 32, kind="layer"),
    Case("layer-minilm-8x128", 8, 12, 128, 128, 32, kind="layer"),
    Case("layer-bert-8x512", 8, 12, 512, 512, 64, kind="layer"),
    Case("layer-bert-ragged", 8, 12, 512, 512, 64, kind="layer", ragged=True),
    Case("layer-1024-1x2048", 1, 16, 2048, 2048, 64, kind="layer"),
    Case("avx2-512-d64", 8, 12, 512, 512, 64, level="avx2"),
    Case("avx2-2048-d128", 1, 8, 2048, 2048, 128, level="avx2"),
    Case("one-thread-article", 2, 5, 4, 6, 20, threads=1),
    Case("one-thread-512-d64", 4, 12, 512, 512, 64, threads=1),
    Case("one-thread-2048-d128", 1, 4, 2048, 2048, 128, threads=1),
    Case("one-thread-causal-2048", 1, 8, 2048, 2048, 64, is_causal="upper_left", threads=1),
    Case("one-thread-decode-4096", 1, 32, 1, 4096, 128, threads=1),
    Case("one-thread-layer-8x128", 8, 12, 128, 128, 32, kind="layer", threads=1),
    Case("one-thread-layer-article-f64", 2, 5, 4, 4, 20, kind="layer", dtype="float64", threads=1),
]
BY_NAME = {case.name: case for case in CASES}
