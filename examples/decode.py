"""Generate token by token with a small decoder on random weights, and compare with one pass over all tokens.

python examples/decode.py [--tokens 256] [--layers 4] [--dtype int8]

The decoder is of Llama's kind: RMS norms, grouped heads, rotary positions, a gated feed-forward network. In NumPy
but for attention: each layer has a KVCache, and a step attends to all tokens before it. Without caches the same decoder
computes everything at once; both must give the same numbers, and the same tokens.
"""

import argparse
import os
import sys
import time

# Each layer alternates NumPy's products and attention. The threads of BLAS spin after every product, on the cores that
# attention then needs; a variable that is set already is left alone.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import numpy as np

import mha_fast

VOCABULARY, DEPTH, BASE = 512, 64, 10000.0


class Decoder:
    """logits = decoder(tokens), a batch of one; `module` is mha_fast or mha_fast.reference."""

    def __init__(self, module=mha_fast, num_layers=4, num_heads=8, num_kv_heads=2, seed=0):
        self.module, self.heads = module, (num_heads, num_kv_heads, num_kv_heads)
        rng, width = np.random.default_rng(seed), num_heads * DEPTH

        def matrix(rows, columns):
            return rng.standard_normal((rows, columns), dtype=np.float32) / np.float32(rows**0.5)

        self.embedding = rng.standard_normal((VOCABULARY, width), dtype=np.float32)
        self.layers = [
            {
                "qkv": [matrix(width, heads * DEPTH) for heads in self.heads],
                "out": matrix(width, width),
                "gate": matrix(width, 3 * width),
                "up": matrix(width, 3 * width),
                "down": matrix(3 * width, width),
            }
            for _ in range(num_layers)
        ]

    def caches(self, max_len, dtype=np.float32):
        return [self.module.KVCache(1, self.heads[1], max_len, DEPTH, dtype=dtype) for _ in self.layers]

    def __call__(self, tokens, caches=None):
        """Logits (len(tokens), VOCABULARY); with caches, the tokens come behind those that the caches hold."""
        x = self.embedding[tokens]
        for number, layer in enumerate(self.layers):
            normed = rms_norm(x)
            qkv = [split(normed @ W, heads) for W, heads in zip(layer["qkv"], self.heads, strict=True)]
            attended = self.whole(*qkv) if caches is None else caches[number].attend(*qkv, rotary_base=BASE)
            x = x + join(attended) @ layer["out"]
            normed = rms_norm(x)
            gate = normed @ layer["gate"]
            x = x + (gate / (1 + np.exp(-gate)) * (normed @ layer["up"])) @ layer["down"]
        return rms_norm(x) @ self.embedding.T

    def whole(self, query, key, value):
        positions = np.arange(query.shape[2])
        query, key = (self.module.apply_rotary(x, positions, base=BASE) for x in (query, key))
        return self.module.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)


def rms_norm(x):
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + 1e-6)


def split(x, heads):
    """(length, heads * depth) -> (1, heads, length, depth), a view."""
    return x.reshape(1, len(x), heads, -1).swapaxes(1, 2)


def join(x):
    return x.swapaxes(1, 2).reshape(x.shape[2], -1)


def generate(decoder, prompt, count, dtype=np.float32, report=lambda done: None):
    """`count` tokens behind the prompt, each the likeliest, and the logits (count, VOCABULARY) that chose them."""
    caches = decoder.caches(len(prompt) + count, dtype)
    logits = [decoder(prompt, caches)[-1]]
    tokens = [int(logits[-1].argmax())]
    while len(tokens) < count:
        logits.append(decoder(tokens[-1:], caches)[0])
        tokens.append(int(logits[-1].argmax()))
        report(len(tokens))
    return tokens, np.array(logits)


def progress(count):
    """A line on a terminal that says how far it is and how fast, at most ten times a second."""
    start = shown = time.perf_counter()

    def report(done):
        nonlocal shown
        now = time.perf_counter()
        if sys.stderr.isatty() and (now - shown > 0.1 or done == count):
            end = "\n" if done == count else ""
            print(f"\r{done}/{count} tokens, {(done - 1) / (now - start):.0f} a second ", end=end, file=sys.stderr)
            shown = now

    return report


def main(arguments=None):
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--tokens", type=int, default=256, help="tokens to generate")
    parser.add_argument("--prompt", type=int, default=64, help="tokens of the prompt")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--dtype", choices=["float32", "float16", "int8"], default="float32", help="of the caches")
    options = parser.parse_args(arguments)
    if min(options.tokens, options.prompt, options.layers) < 1:
        parser.error("--tokens, --prompt and --layers are at least 1")

    decoder = Decoder(num_layers=options.layers)
    prompt = np.random.default_rng(1).integers(VOCABULARY, size=options.prompt).tolist()
    start = time.perf_counter()
    tokens, logits = generate(decoder, prompt, options.tokens, options.dtype, progress(options.tokens))
    seconds = time.perf_counter() - start
    print(f"{len(tokens) / seconds:.0f} tokens/s, {options.dtype} cache, {options.layers} layers, prompt included")

    # Row t of the whole pass chooses token t + 1; the last token chooses nothing here.
    whole = decoder(prompt + tokens[:-1])[len(prompt) - 1 :]
    error = np.abs(logits - whole).max() / np.abs(whole).max()
    same = int(np.sum(whole.argmax(axis=1) == tokens))
    print(f"one pass over all: {same} of {len(tokens)} tokens the same, logits within {error:.1e} of the largest")
    if error > {"float32": 1e-4, "float16": 2e-2, "int8": 1e-1}[options.dtype]:
        raise SystemExit("FAILED: the logits differ by more than the cache's rounding explains")


if __name__ == "__main__":
    main()
