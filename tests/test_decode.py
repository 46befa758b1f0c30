"""The example that decodes: with caches and at once it computes the same, in both implementations."""

import numpy as np
import pytest

import mha_fast
import mha_fast.reference
from examples.decode import Decoder, generate, main


@pytest.mark.parametrize("module", [mha_fast, mha_fast.reference])
def test_generated_tokens(module):
    decoder, prompt = Decoder(module, num_layers=2), [3, 1, 4, 1, 5]
    done = []
    tokens, logits = generate(decoder, prompt, 12, report=done.append)
    whole = decoder(prompt + tokens[:-1])[len(prompt) - 1 :]
    assert whole.argmax(axis=1).tolist() == tokens and done == list(range(2, 13))
    np.testing.assert_allclose(logits, whole, atol=1e-4 * np.abs(whole).max())


@pytest.mark.parametrize("dtype", ["float32", "float16", "int8"])
def test_main(dtype, capsys):
    main(["--tokens", "9", "--prompt", "4", "--layers", "1", "--dtype", dtype])
    shown = capsys.readouterr().out
    assert "tokens/s" in shown and "9 of 9 tokens the same" in shown


def test_bad_options():
    with pytest.raises(SystemExit):
        main(["--tokens", "0"])
