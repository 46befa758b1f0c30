"""Draw the attention weights of a small layer, causal and with lengths, into a file.

pip install -e ".[plot]"
python examples/attention_heatmap.py heatmap.svg      (or .png, .pdf)
"""

import argparse

import numpy as np

import mha_fast
from mha_fast.plot import attention_heatmap

TOKENS = "A query weighs every value by how well its key matches .".split()


def weights(tokens, num_heads=4, depth=16):
    """(num_heads, L, L): a causal layer with random weights over one random vector a token."""
    rng = np.random.default_rng(0)
    width = num_heads * depth
    W_q, W_k, W_v, W_o = rng.standard_normal((4, width, width)) / width**0.5
    layer = mha_fast.MultiHeadAttention.from_arrays(num_heads, W_q=W_q, W_k=W_k, W_v=W_v, W_o=W_o)
    x = rng.standard_normal((1, len(tokens), width))
    layer(x, x, x, is_causal=True, need_weights=True)
    return layer.attention_weights[0]


def main(arguments=None):
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("path", help="file to write, its suffix says the kind")
    path = parser.parse_args(arguments).path
    figure = attention_heatmap(weights(TOKENS), query_tokens=TOKENS, key_tokens=TOKENS, title="Causal attention")
    figure.savefig(path)
    print(f"wrote {path}")


if __name__ == "__main__":
    main()
