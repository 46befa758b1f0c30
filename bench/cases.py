"""The named cases: sizes, arrays, the work they hold and what bounds it. Benchmarks and tests share them."""

import math
from dataclasses import dataclass, replace

import numpy as np

DRAWN = 1048573


@dataclass(frozen=True)
class Case:
    """One call. `num_kv_heads` 0 means as many as num_heads; kind "layer" is self-attention with four projections."""

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
    ragged: bool = False  # valid_lens between an eighth and the whole of kv_len
    mask: str = ""  # "", "bool" (q_len, kv_len), "bias" (1, num_heads, q_len, kv_len)
    layout: str = "bhld"
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

    def lengths(self):
        if not self.ragged:
            return np.full(self.batch, self.kv_len)
        return np.random.default_rng(7).integers(max(1, self.kv_len // 8), self.kv_len + 1, self.batch)

    def flops(self):
        """Multiplications and additions that the visible keys need."""
        pairs = float(self.q_len * self.lengths().sum())
        if self.is_causal:
            queries = np.arange(self.q_len)
            offset = self.kv_len - self.q_len if self.is_causal == "lower_right" else 0
            seen = np.clip(queries + offset + 1, 0, self.lengths()[:, None])
            pairs = float(seen.sum())
        projections = 4 * 2.0 * self.batch * self.q_len * self.num_hiddens**2 if self.kind == "layer" else 0.0
        return 4.0 * self.num_heads * self.head_dim * pairs + projections

    def kv_bytes(self):
        """Bytes of the keys and values that somebody sees, each counted once."""
        return 2.0 * self.kv_heads * self.head_dim * np.dtype(self.dtype).itemsize * float(self.lengths().sum())

    def limit_seconds(self, fma_gflops, read_gbs):
        """The shortest time that the machine allows; fma_gflops is of float32."""
        peak = fma_gflops * (0.5 if self.dtype == "float64" else 1) * 1e9
        reading = self.kv_bytes() / (read_gbs * 1e9) if self.limit == "read" else 0.0
        return max(self.flops() / peak, reading)

    def arrays(self):
        """query, key, value and options of scaled_dot_product_attention; for a layer its input, weights and options."""
        rng = np.random.default_rng(11)
        options = {}
        if self.ragged:
            options["valid_lens"] = self.lengths()
        if self.kind == "layer":
            n = self.num_hiddens
            weights = {f"W_{x}": self.draw(rng, n, n) / self.scalar(math.sqrt(n)) for x in "qkvo"}
            weights |= {f"b_{x}": self.draw(rng, n) for x in "qkvo"}
            return (self.draw(rng, self.batch, self.q_len, n),), weights, options
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
        return tuple(inputs), {}, options

    def additive_mask(self, options):
        """All that hides or biases keys as one array to add to (batch, heads, q_len, kv_len) scores, or None."""
        visible = np.ones((1, 1, 1, self.kv_len), bool)
        if self.ragged:
            visible = visible & (np.arange(self.kv_len) < self.lengths()[:, None, None, None])
        if self.is_causal:
            offset = self.kv_len - self.q_len if self.is_causal == "lower_right" else 0
            visible = visible & np.tri(self.q_len, self.kv_len, offset, dtype=bool)
        if self.mask == "bool":
            visible = visible & options["attn_mask"]
        if self.mask == "bias":
            return np.where(visible, options["attn_mask"], self.scalar(-np.inf))
        return None if visible.all() else np.where(visible, self.scalar(0), self.scalar(-np.inf))

    def scalar(self, x):
        return np.dtype(self.dtype).type(x)

    def draw(self, rng, *shape):
        """Normal numbers; large arrays repeat a prime number of them, since drawing would take longer than the call."""
        return np.resize(rng.standard_normal(min(math.prod(shape), DRAWN), dtype=self.dtype), shape)

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
        )


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
    Case("vit-197", 16, 12, 197, 197, 64),
    Case("cross-64x1500", 4, 8, 64, 1500, 64),
    Case("causal-512-d64", 8, 12, 512, 512, 64, is_causal="upper_left"),
    Case("causal-2048-d64", 1, 8, 2048, 2048, 64, is_causal="upper_left"),
    Case("causal-4096-d128", 1, 8, 4096, 4096, 128, is_causal="upper_left"),
    Case("causal-gqa-2048-d128", 1, 32, 2048, 2048, 128, num_kv_heads=8, is_causal="upper_left"),
    Case("chunk-256-of-4096", 1, 16, 256, 4096, 64, is_causal="lower_right"),
    Case("ragged-512", 8, 12, 512, 512, 64, ragged=True),
    Case("bool-mask-512", 8, 12, 512, 512, 64, mask="bool"),
    Case("bias-512", 8, 12, 512, 512, 64, mask="bias"),
    Case("decode-4096", 1, 32, 1, 4096, 128),
    Case("decode-4096-gqa", 4, 32, 1, 4096, 128, num_kv_heads=8),
    Case("decode-32768-gqa", 1, 32, 1, 32768, 128, num_kv_heads=8),
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
