"""The example's encoder: a miniature with random weights always, the real all-MiniLM-L6-v2 where it is installed.

`python tests/test_example.py` records tests/data/minilm_embeddings.npz anew, from the reference in float64.
"""

from pathlib import Path

import numpy as np
import pytest

import mha_fast
import mha_fast.reference
from examples.sentence_embeddings import INSTALL, Encoder, WordPiece, gelu, load_model, main

RECORD = Path(__file__).parent / "data" / "minilm_embeddings.npz"
SENTENCES = ["A cat sat on the mat.", "Multi-head attention, fused: naïve façade!", "Hi"]
CONFIG = {
    "hidden_size": 12, "num_attention_heads": 3, "num_hidden_layers": 2, "layer_norm_eps": 1e-12
}  # fmt: skip


def random_weights(config, vocabulary=20, positions=16):
    rng, n = np.random.default_rng(5), config["hidden_size"]
    shapes = {
        "embeddings.word_embeddings.weight": (vocabulary, n),
        "embeddings.position_embeddings.weight": (positions, n),
        "embeddings.token_type_embeddings.weight": (2, n),
        "embeddings.LayerNorm.weight": (n,),
        "embeddings.LayerNorm.bias": (n,),
    }
    for number in range(config["num_hidden_layers"]):
        prefix = f"encoder.layer.{number}."
        for name in ("attention.self.query", "attention.self.key", "attention.self.value", "attention.output.dense"):
            shapes |= {f"{prefix}{name}.weight": (n, n), f"{prefix}{name}.bias": (n,)}
        shapes |= {f"{prefix}intermediate.dense.weight": (4 * n, n), f"{prefix}intermediate.dense.bias": (4 * n,)}
        shapes |= {f"{prefix}output.dense.weight": (n, 4 * n), f"{prefix}output.dense.bias": (n,)}
        for name in ("attention.output.LayerNorm", "output.LayerNorm"):
            shapes |= {f"{prefix}{name}.weight": (n,), f"{prefix}{name}.bias": (n,)}
    return {name: rng.standard_normal(shape, dtype=np.float32) for name, shape in shapes.items()}


@pytest.mark.parametrize("module", [mha_fast, mha_fast.reference])
def test_miniature(module):
    weights, sentences = random_weights(CONFIG), [[1, 5, 7, 2], [1, 2], [1, 9, 9, 4, 3, 8, 2]]
    embeddings = Encoder(module, weights, CONFIG)(sentences)
    assert embeddings.shape == (3, 12) and embeddings.dtype == np.float32
    np.testing.assert_allclose(np.linalg.norm(embeddings, axis=1), 1, rtol=1e-5)
    exact = Encoder(mha_fast.reference, {k: w.astype(float) for k, w in weights.items()}, CONFIG)(sentences)
    np.testing.assert_allclose(embeddings, exact, atol=2e-5)
    for sentence, embedding in zip(sentences, embeddings, strict=True):
        alone = Encoder(module, weights, CONFIG)([sentence])[0]
        np.testing.assert_allclose(alone, embedding, atol=2e-5)


def test_word_pieces():
    tokenise = WordPiece(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "un", "##aff", "##able", "cafe", "!", "中"])
    assert tokenise("Unaffable  CAFÉ!") == [2, 4, 5, 6, 7, 8, 3]
    assert tokenise("unzz 中中") == [2, 1, 9, 9, 3]
    assert tokenise("cafe " * 50, max_length=7) == [2, 7, 7, 7, 7, 7, 3]
    assert tokenise("") == [2, 3]


def test_gelu():
    values = np.array([-10.0, -1.0, 0.0, 0.5, 10.0])
    np.testing.assert_allclose(gelu(values), [0, -0.15865525393, 0, 0.34573123063, 10], atol=1e-6)


def test_message_without_the_model(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(SystemExit) as error:
        main([])
    assert str(error.value) == INSTALL.format(missing="the weights of all-MiniLM-L6-v2")


def real_model():
    try:
        return load_model()
    except ModuleNotFoundError as error:
        pytest.skip(str(error).partition(".")[0])


@pytest.mark.parametrize("module", [mha_fast, mha_fast.reference])
def test_real_model(module):
    weights, config, tokenise = real_model()
    embeddings = Encoder(module, weights, config)([tokenise(sentence) for sentence in SENTENCES])
    recorded = np.load(RECORD)["embeddings"]
    np.testing.assert_allclose(embeddings, recorded, atol=1e-5)
    assert (embeddings * recorded).sum(1).min() > 0.999999


def test_main_on_the_real_model(capsys):
    real_model()
    main(["--runs", "1", "one sentence", "another sentence"])
    shown = capsys.readouterr().out
    assert "similarity (cosine)" in shown and "another sentence" in shown and "attention layers" in shown


def record():
    weights, config, tokenise = load_model()
    weights = {name: array.astype(float) for name, array in weights.items() if array.dtype == np.float32}
    exact = Encoder(mha_fast.reference, weights, config)
    embeddings = exact([tokenise(sentence) for sentence in SENTENCES])
    np.savez_compressed(RECORD, embeddings=embeddings.astype(np.float32))


if __name__ == "__main__":
    record()
