"""Wrong windows, caps, slopes, sinks, rows of weights and dtypes: each an error with its text, before any work."""

import math

import ml_dtypes
import numpy as np
import pytest

from mha_fast import reference

IMPLEMENTATIONS = {"reference": reference}
BFLOAT16 = ml_dtypes.bfloat16
SUPPORTED = "float16, bfloat16, float32 and float64 are supported, bool and integers become float64"
BY_LAYERS = "layers support float32 and float64, bool and integers become float64"


@pytest.fixture(params=IMPLEMENTATIONS)
def implementation(request):
    return IMPLEMENTATIONS[request.param]


def ones(*shape, dtype="float64"):
    return np.ones(shape, dtype)


def base(dtype="float64"):
    """Arguments that are right: batch 2, 4 query heads, 3 queries, 5 keys, widths 6 and 7."""
    shapes = {"query": (2, 4, 3, 6), "key": (2, 4, 5, 6), "value": (2, 4, 5, 7)}
    return {name: ones(*shape, dtype=dtype) for name, shape in shapes.items()}


def raised(call):
    with pytest.raises(Exception) as info:
        call()
    return type(info.value), str(info.value)


PAIR = "expected a pair (left, right): how many keys before and behind its own position a query sees, -1 for no limit"
HEADS = "expected (4,) or (2, 4): a number for each query head"

SCORES = {
    # Windows.
    "window int": ({"window_size": 128}, TypeError, f"window_size is 128; {PAIR}"),
    "window numpy int": (
        {"window_size": np.array(3)},
        TypeError,
        f"window_size is an array of shape (); {PAIR}",
    ),
    "window None": ({"window_size": None}, TypeError, f"window_size is None; {PAIR}"),
    "window text": ({"window_size": "12"}, TypeError, f"window_size is '12'; {PAIR}"),
    "window set": ({"window_size": {1, 2}}, TypeError, f"window_size is {{1, 2}}; {PAIR}"),
    "window matrix": ({"window_size": ones(2, 2)}, TypeError, f"window_size is an array of shape (2, 2); {PAIR}"),
    "window of one": ({"window_size": (1,)}, ValueError, "window_size is (1,); expected two integers: (left, right)"),
    "window of three": (
        {"window_size": [1, 2, 3]},
        ValueError,
        "window_size is [1, 2, 3]; expected two integers: (left, right)",
    ),
    "window below -1": ({"window_size": (-2, 0)}, ValueError, "window_size[0] is -2; expected at least -1"),
    "window long": (
        {"window_size": (0, -(10**5000))},
        ValueError,
        "window_size[1] is of type int; expected at least -1",
    ),
    "window float": ({"window_size": (1.0, 0)}, TypeError, "window_size[0] is 1.0; expected an integer"),
    "window floats": (
        {"window_size": ones(2)},
        TypeError,
        f"window_size[0] is {np.float64(1.0)!r}; expected an integer",
    ),
    "window bool": ({"window_size": (0, True)}, TypeError, "window_size[1] is True; expected an integer"),
    "window half": ({"window_size": (None, 0)}, TypeError, "window_size[0] is None; expected an integer"),
    # Softcap.
    "softcap negative": (
        {"softcap": -1.0},
        ValueError,
        "softcap is -1.0; expected 0, which is none, or a positive number",
    ),
    "softcap NaN": ({"softcap": math.nan}, ValueError, "softcap is nan; expected a finite number"),
    "softcap inf": ({"softcap": math.inf}, ValueError, "softcap is inf; expected a finite number"),
    "softcap None": ({"softcap": None}, TypeError, "softcap is None; expected a real number"),
    "softcap bool": ({"softcap": True}, TypeError, "softcap is True; expected a real number"),
    "softcap text": ({"softcap": "30"}, TypeError, "softcap is '30'; expected a real number"),
    "softcap beyond float32": (
        base("f4") | {"softcap": 1e39},
        ValueError,
        "softcap is 1e+39; expected 0 or a number within the normal range of float32",
    ),
    "softcap below float32": (
        base("f2") | {"softcap": 1e-40},
        ValueError,
        "softcap is 1e-40; expected 0 or a number within the normal range of float32",
    ),
    "softcap below float64": (
        {"softcap": 1e-310},
        ValueError,
        "softcap is 1e-310; expected 0 or a number within the normal range of float64",
    ),
    # Slopes.
    "slopes scalar": ({"alibi_slopes": 0.5}, ValueError, f"alibi_slopes has shape (); {HEADS}"),
    "slopes of the batch": ({"alibi_slopes": ones(2)}, ValueError, f"alibi_slopes has shape (2,); {HEADS}"),
    "slopes of one batch": ({"alibi_slopes": ones(1, 4)}, ValueError, f"alibi_slopes has shape (1, 4); {HEADS}"),
    "slopes of kv heads": (
        {"key": ones(2, 2, 5, 6), "value": ones(2, 2, 5, 7), "enable_gqa": True, "alibi_slopes": ones(2)},
        ValueError,
        f"alibi_slopes has shape (2,); {HEADS}",
    ),
    "slopes of queries": (
        {"alibi_slopes": ones(2, 4, 3)},
        ValueError,
        f"alibi_slopes has shape (2, 4, 3); {HEADS}",
    ),
    "slopes of a matrix": (
        {"query": ones(3, 6), "key": ones(5, 6), "value": ones(5, 7), "alibi_slopes": 0.5},
        ValueError,
        "alibi_slopes has shape (); expected (1,): a number for each query head",
    ),
    "slopes NaN": (
        {"alibi_slopes": [1, 2, math.nan, 4]},
        ValueError,
        "alibi_slopes holds NaN or infinity; expected finite numbers",
    ),
    "slopes inf": (
        {"alibi_slopes": [[1, 2, 3, 4], [1, 2, 3, -math.inf]]},
        ValueError,
        "alibi_slopes holds NaN or infinity; expected finite numbers",
    ),
    "slopes complex": (
        {"alibi_slopes": ones(4, dtype="c8")},
        TypeError,
        f"alibi_slopes has dtype complex64; {SUPPORTED}",
    ),
    "slopes objects": ({"alibi_slopes": [None] * 4}, TypeError, f"alibi_slopes has dtype object; {SUPPORTED}"),
    # Sinks.
    "sinks scalar": (
        {"sinks": 0.0},
        ValueError,
        "sinks has shape (); expected (4,): a number for each query head",
    ),
    "sinks of the batch": (
        {"sinks": ones(2, 4)},
        ValueError,
        "sinks has shape (2, 4); expected (4,): a number for each query head",
    ),
    "sinks NaN": (
        {"sinks": [0, math.nan, 0, 0]},
        ValueError,
        "sinks holds NaN or infinity; expected finite numbers, or -inf for none",
    ),
    "sinks inf": (
        {"sinks": np.array([0, math.inf, 0, 0], "f2")},
        ValueError,
        "sinks holds NaN or infinity; expected finite numbers, or -inf for none",
    ),
    "sinks bfloat16 NaN": (
        base("f4") | {"sinks": np.array([0, math.nan, 0, 0], BFLOAT16)},
        ValueError,
        "sinks holds NaN or infinity; expected finite numbers, or -inf for none",
    ),
    "sinks longdouble": (
        {"sinks": ones(4, dtype="g")},
        TypeError,
        f"sinks has dtype {np.dtype('g')}; {SUPPORTED}",
    ),
    "sinks text": ({"sinks": "none"}, TypeError, f"sinks has dtype <U4; {SUPPORTED}"),
    # Rows of weights.
    "rows alone": (
        {"weights_rows": [0]},
        ValueError,
        "weights_rows chooses rows of the weights; expected return_weights=True beside it",
    ),
    "rows beyond": (
        {"return_weights": True, "weights_rows": [0, 3]},
        ValueError,
        "weights_rows holds 3, but there are 3 queries",
    ),
    "rows before": (
        {"return_weights": True, "weights_rows": [-3, -4]},
        ValueError,
        "weights_rows holds -4, but there are 3 queries",
    ),
    "rows far beyond": (
        {"return_weights": True, "weights_rows": np.array([2**64 - 1], np.uint64)},
        ValueError,
        f"weights_rows holds {2**64 - 1}, but there are 3 queries",
    ),
    "rows of none": (
        {"query": ones(2, 4, 0, 6), "return_weights": True, "weights_rows": [0]},
        ValueError,
        "weights_rows holds 0, but there are 0 queries",
    ),
    "rows scalar": (
        {"return_weights": True, "weights_rows": 1},
        ValueError,
        "weights_rows has shape (); expected 1 dimension: the numbers of queries",
    ),
    "rows of the batch": (
        {"return_weights": True, "weights_rows": [[1], [2]]},
        ValueError,
        "weights_rows has shape (2, 1); expected 1 dimension: the numbers of queries",
    ),
    "rows float": (
        {"return_weights": True, "weights_rows": [1.0]},
        TypeError,
        "weights_rows has dtype float64; expected integers",
    ),
    "rows bool": (
        {"return_weights": True, "weights_rows": [True, False, True]},
        TypeError,
        "weights_rows has dtype bool; expected integers",
    ),
}

DTYPES = {
    "bfloat16 beside integers": (
        base(BFLOAT16) | {"key": ones(2, 4, 5, 6, dtype="i8")},
        TypeError,
        "key has dtype int64 and query has dtype bfloat16; expected floating numbers beside bfloat16",
    ),
    "bool beside bfloat16": (
        base() | {"query": ones(2, 4, 3, 6, dtype=bool), "value": ones(2, 4, 5, 7, dtype=BFLOAT16)},
        TypeError,
        "query has dtype bool and value has dtype bfloat16; expected floating numbers beside bfloat16",
    ),
    "float8": (
        {"value": ones(2, 4, 5, 7, dtype=ml_dtypes.float8_e4m3fn)},
        TypeError,
        f"value has dtype float8_e4m3fn; {SUPPORTED}",
    ),
    "other float8": (
        {"value": ones(2, 4, 5, 7, dtype=ml_dtypes.float8_e5m2)},
        TypeError,
        f"value has dtype float8_e5m2; {SUPPORTED}",
    ),
    "int4": (
        {"query": ones(2, 4, 3, 6, dtype=ml_dtypes.int4)},
        TypeError,
        f"query has dtype int4; {SUPPORTED}",
    ),
    "float16 out of float32": (
        base("f4") | {"out": ones(2, 4, 3, 7, dtype="f2")},
        TypeError,
        "out has dtype float16; expected float32",
    ),
    "float32 out of float16": (
        base("f2") | {"out": ones(2, 4, 3, 7, dtype="f4")},
        TypeError,
        "out has dtype float32; expected float16",
    ),
    "float16 out of bfloat16": (
        base(BFLOAT16) | {"out": ones(2, 4, 3, 7, dtype="f2")},
        TypeError,
        "out has dtype float16; expected bfloat16",
    ),
    "bfloat16 out of a mixture": (
        base(BFLOAT16) | {"key": ones(2, 4, 5, 6, dtype="f2"), "out": ones(2, 4, 3, 7, dtype=BFLOAT16)},
        TypeError,
        "out has dtype bfloat16; expected float32",
    ),
    "scale beyond float32": (
        base("f2") | {"scale": 1e39},
        ValueError,
        "scale is 1e+39; expected a number within the range of float32",
    ),
}


@pytest.mark.parametrize("case", SCORES | DTYPES)
def test_attention(implementation, case):
    changes, kind, text = (SCORES | DTYPES)[case]
    arguments = {"out": None} | base() | changes
    before = {name: value.tobytes() for name, value in arguments.items() if isinstance(value, np.ndarray)}
    assert raised(lambda: implementation.scaled_dot_product_attention(**arguments)) == (kind, text)
    assert {name: arguments[name].tobytes() for name in before} == before


@pytest.mark.parametrize("name", ["alibi_slopes", "sinks", "weights_rows"])
def test_out_shares_memory_with_any_array(implementation, name):
    memory = np.zeros(2 * 4 * 3 * 7)
    array = memory[-4:] if name != "weights_rows" else memory[-4:].view(np.int64)
    arguments = base() | {name: array, "return_weights": True, "out": memory.reshape(2, 4, 3, 7)}
    got = raised(lambda: implementation.scaled_dot_product_attention(**arguments))
    assert got == (ValueError, f"out shares memory with {name}; expected memory of its own")
    assert not memory.any()


def test_slopes_that_no_array_holds(implementation):
    """2**40 heads have a slope each; all of 2**40 batch elements would be seen as 2**80 numbers."""
    query, key = np.broadcast_to(1.0, (1, 2**40, 0, 0)), np.broadcast_to(1.0, (2**40, 1, 1, 0))
    slopes = np.broadcast_to(np.float16(0), (2**40,))
    call = implementation.scaled_dot_product_attention
    got = raised(lambda: call(query, key, key, enable_gqa=True, alibi_slopes=slopes))
    assert got == (ValueError, f"alibi_slopes would have shape ({2**40}, {2**40}), more than an array can hold")


@pytest.mark.parametrize("name", ["alibi_slopes", "sinks"])
def test_numbers_of_more_heads_than_memory_holds(implementation, name):
    """A repeated number is looked at once; the call itself has no rows."""
    arrays = [np.broadcast_to(1.0, (2**40, length, 1)) for length in (0, 1, 1)]
    numbers = np.broadcast_to(np.float16(0), (2**40,))
    out = implementation.scaled_dot_product_attention(*arrays, **{name: numbers})
    assert out.shape == (2**40, 0, 1)


@pytest.mark.parametrize(
    "dtype, named",
    [("float16", "float16"), (BFLOAT16, "bfloat16"), (ml_dtypes.float8_e5m2, "float8_e5m2")],
    ids=["float16", "bfloat16", "float8"],
)
def test_layers_take_no_half_precision(implementation, dtype, named):
    layer = implementation.MultiHeadAttention(8, 2, rng=0)
    network = implementation.PositionWiseFFN(8, 4, rng=0)
    x, narrow = ones(1, 3, 8), ones(1, 3, 8, dtype=dtype)
    assert raised(lambda: layer(narrow, x, x)) == (TypeError, f"queries has dtype {named}; {BY_LAYERS}")
    assert raised(lambda: layer(x, x, narrow)) == (TypeError, f"values has dtype {named}; {BY_LAYERS}")
    assert raised(lambda: network(narrow)) == (TypeError, f"X has dtype {named}; {BY_LAYERS}")
    layer.W_k = ones(8, 8, dtype=dtype)
    assert raised(lambda: layer(x, x, x)) == (TypeError, f"W_k has dtype {named}; {BY_LAYERS}")
    network.b_2 = ones(8, dtype=dtype)
    assert raised(lambda: network(x)) == (TypeError, f"b_2 has dtype {named}; {BY_LAYERS}")


@pytest.mark.parametrize(
    "heads, kind, text",
    [
        (0, ValueError, "num_heads is 0; expected at least 1"),
        (-3, ValueError, "num_heads is -3; expected at least 1"),
        (2.0, TypeError, "num_heads is 2.0; expected an integer"),
        (True, TypeError, "num_heads is True; expected an integer"),
        ("8", TypeError, "num_heads is '8'; expected an integer"),
        (2**70, ValueError, f"alibi_slopes would have shape ({2**70},), more than an array can hold"),
    ],
)
def test_slopes_of_no_number_of_heads(implementation, heads, kind, text):
    assert raised(lambda: implementation.alibi_slopes(heads)) == (kind, text)
