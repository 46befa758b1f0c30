"""Every wrong argument: the same exception with the same text from both implementations.

Each case also checks that nothing of the caller's was changed, `out` included. Whatever is passed,
the process goes on: sizes that overflow, empty arrays, arrays of foreign dtypes.
"""

import math

import numpy as np
import pytest

import mha_fast
from mha_fast import _validate, reference

IMPLEMENTATIONS = {"fast": mha_fast, "reference": reference}
SUPPORTED = "float16, bfloat16, float32 and float64 are supported, bool and integers become float64"
BY_LAYERS = "layers support float32 and float64, bool and integers become float64"


@pytest.fixture(params=IMPLEMENTATIONS)
def implementation(request):
    """One of the two modules; a test that takes it holds for both."""
    return IMPLEMENTATIONS[request.param]


def snapshot(value):
    """Something that compares equal as long as the caller's value was not changed."""
    if isinstance(value, np.ndarray):
        return value.tobytes() if value.size < 10**6 else value.shape
    return repr(value) if isinstance(value, list) else None


def raised(call):
    with pytest.raises(Exception) as info:
        call()
    return type(info.value), str(info.value)


# ---------------------------------------------------------------- scaled_dot_product_attention


def ones(*shape, dtype="float64"):
    return np.ones(shape, dtype)


def base():
    """Arguments that are right: batch 2, 4 query heads, 3 queries, 5 keys, widths 6 and 7."""
    return {"query": ones(2, 4, 3, 6), "key": ones(2, 4, 5, 6), "value": ones(2, 4, 5, 7)}


def records(shape):
    """A view into a packed structure: strides that are no multiple of the item size."""
    return np.zeros(shape, [("flag", "i1"), ("number", "f8")])["number"]


def shared(part):
    """Query and out from one buffer, which overlap unless part is 1."""
    buffer = ones(2, 2, 4, 3, 6)
    return {"query": buffer[0], "value": ones(2, 4, 5, 6), "out": buffer[part]}


def undecidable():
    """Two views of one buffer whose overlap is too hard to decide within the limit of work."""
    buffer = np.zeros(2**19)
    query = np.lib.stride_tricks.as_strided(buffer, (38, 17, 37), (8 * 1249, 8 * 1649, 8 * 455), writeable=False)
    out = np.lib.stride_tricks.as_strided(buffer[19:], (38, 17, 37), (8 * 11653, 8 * 684, 8 * 16))
    with pytest.raises(np.exceptions.TooHardError):
        np.shares_memory(query, out, max_work=10_000)
    return {"query": query, "key": ones(38, 2, 37), "value": ones(38, 2, 37), "out": out}


MASK_DTYPES = "expected bool (True = may attend), float16, bfloat16, float32 or float64 (added to the scores)"
INTEGER_MASK = (
    "expected bool (True = may attend: attn_mask != 0) or floating (added to the scores: "
    "attn_mask.astype(numpy.float32))"
)
CAUSAL = 'expected True, False, "upper_left" or "lower_right"'
LENGTHS = "expected (2,) or (2, 3): the leading dimensions without heads, with or without the queries"
ADDRESSABLE = "expected an aligned array whose strides are multiples of 8 bytes"

ATTENTION = {
    # Ranks and shapes.
    "no dimension": (
        {"query": 1.0},
        ValueError,
        "query has shape (); expected at least 2 dimensions: length and width",
    ),
    "one dimension": (
        {"value": ones(5)},
        ValueError,
        "value has shape (5,); expected at least 2 dimensions: length and width",
    ),
    "ranks": (
        {"key": ones(4, 5, 6)},
        ValueError,
        "query, key and value have 4, 3 and 4 dimensions; expected the same number",
    ),
    "width": ({"key": ones(2, 4, 5, 8)}, ValueError, "query has width 6 but key has 8"),
    "value longer than key": ({"value": ones(2, 4, 6, 7)}, ValueError, "key has length 5 but value has 6"),
    "value shorter than key": ({"value": ones(2, 4, 1, 7)}, ValueError, "key has length 5 but value has 1"),
    "key and value heads": ({"value": ones(2, 2, 5, 7)}, ValueError, "key has 4 heads but value has 2"),
    "key and value heads, grouped": (
        {"value": ones(2, 1, 5, 7), "enable_gqa": True},
        ValueError,
        "key has 4 heads but value has 1",
    ),
    "groups without enable_gqa": (
        {"key": ones(2, 2, 5, 6), "value": ones(2, 2, 5, 7)},
        ValueError,
        "query has 4 heads but key has 2; expected the same, or enable_gqa=True and a multiple",
    ),
    "one key head is not broadcast": (
        {"key": ones(2, 1, 5, 6), "value": ones(2, 1, 5, 7)},
        ValueError,
        "query has 4 heads but key has 1; expected the same, or enable_gqa=True and a multiple",
    ),
    "no multiple": (
        {"key": ones(2, 3, 5, 6), "value": ones(2, 3, 5, 7), "enable_gqa": True},
        ValueError,
        "query has 4 heads, which is no multiple of the 3 heads of key",
    ),
    "more key heads": (
        {"key": ones(2, 8, 5, 6), "value": ones(2, 8, 5, 7), "enable_gqa": True},
        ValueError,
        "query has 4 heads, which is no multiple of the 8 heads of key",
    ),
    "no key heads": (
        {"key": ones(2, 0, 5, 6), "value": ones(2, 0, 5, 7), "enable_gqa": True},
        ValueError,
        "query has 4 heads, which is no multiple of the 0 heads of key",
    ),
    "batches": (
        {"key": ones(3, 4, 5, 6)},
        ValueError,
        "the leading dimensions of query (2,), key (3,) and value (2,) do not broadcast",
    ),
    "batch of 0": (
        {"value": ones(0, 4, 5, 7)},
        ValueError,
        "the leading dimensions of query (2,), key (2,) and value (0,) do not broadcast",
    ),
    "blhd heads": (
        {"layout": "blhd", "key": ones(2, 3, 4, 6), "value": ones(2, 3, 4, 7)},
        ValueError,
        "query has 3 heads but key has 4; expected the same, or enable_gqa=True and a multiple",
    ),
    # Dtypes of the inputs.
    "complex": ({"key": ones(2, 4, 5, 6, dtype="c8")}, TypeError, f"key has dtype complex64; {SUPPORTED}"),
    "longdouble": (
        {"value": ones(2, 4, 5, 7, dtype="g")},
        TypeError,
        f"value has dtype {np.dtype('g')}; {SUPPORTED}",
    ),
    "objects": ({"value": ones(2, 4, 5, 7, dtype="O")}, TypeError, f"value has dtype object; {SUPPORTED}"),
    "None": ({"key": None}, TypeError, f"key has dtype object; {SUPPORTED}"),
    "text": ({"query": "query"}, TypeError, f"query has dtype <U5; {SUPPORTED}"),
    "bytes": ({"query": ones(2, 4, 3, 6, dtype="S1")}, TypeError, f"query has dtype |S1; {SUPPORTED}"),
    "dates": (
        {"query": np.zeros((2, 4, 3, 6), "M8[s]")},
        TypeError,
        f"query has dtype datetime64[s]; {SUPPORTED}",
    ),
    "durations": (
        {"query": np.zeros((2, 4, 3, 6), "m8[s]")},
        TypeError,
        f"query has dtype timedelta64[s]; {SUPPORTED}",
    ),
    "records": (
        {"query": np.zeros((2, 4, 3, 6), [("a", "<f4")])},
        TypeError,
        f"query has dtype [('a', '<f4')]; {SUPPORTED}",
    ),
    "masked entries": (
        {"query": np.ma.masked_equal(ones(2, 4, 3, 6), 1)},
        ValueError,
        "query is a masked array with masked entries; fill them, and hide keys with attn_mask or valid_lens",
    ),
    # Options.
    "dropout": ({"dropout_p": 0.5}, ValueError, "dropout_p is 0.5; expected 0, for nothing is ever dropped"),
    "dropout NaN": ({"dropout_p": math.nan}, ValueError, "dropout_p is nan; expected a finite number"),
    "dropout text": ({"dropout_p": "no"}, TypeError, "dropout_p is 'no'; expected a real number"),
    "dropout None": ({"dropout_p": None}, TypeError, "dropout_p is None; expected a real number"),
    "dropout bool": ({"dropout_p": False}, TypeError, "dropout_p is False; expected a real number"),
    "dropout complex": ({"dropout_p": 0j}, TypeError, "dropout_p is 0j; expected a real number"),
    "dropout array": ({"dropout_p": ones(2)}, TypeError, "dropout_p is an array of shape (2,); expected a real number"),
    "causal number": ({"is_causal": 1}, TypeError, f"is_causal is 1; {CAUSAL}"),
    "causal None": ({"is_causal": None}, TypeError, f"is_causal is None; {CAUSAL}"),
    "causal array": ({"is_causal": ones(2)}, TypeError, f"is_causal is an array of shape (2,); {CAUSAL}"),
    "causal word": ({"is_causal": "left"}, ValueError, f"is_causal is 'left'; {CAUSAL}"),
    "causal case": ({"is_causal": "Lower_Right"}, ValueError, f"is_causal is 'Lower_Right'; {CAUSAL}"),
    "scale NaN": ({"scale": math.nan}, ValueError, "scale is nan; expected a finite number"),
    "scale inf": ({"scale": -math.inf}, ValueError, "scale is -inf; expected a finite number"),
    "scale text": ({"scale": "1"}, TypeError, "scale is '1'; expected a real number"),
    "scale bool": ({"scale": True}, TypeError, "scale is True; expected a real number"),
    "scale complex": ({"scale": 1j}, TypeError, "scale is 1j; expected a real number"),
    "scale array": ({"scale": ones(1)}, TypeError, "scale is an array of shape (1,); expected a real number"),
    "scale long": ({"scale": 10**5000}, ValueError, "scale is of type int; expected a finite number"),
    "scale beyond float32": (
        {name: array.astype("f4") for name, array in base().items()} | {"scale": 1e39},
        ValueError,
        "scale is 1e+39; expected a number within the range of float32",
    ),
    "enable_gqa": ({"enable_gqa": 1}, TypeError, "enable_gqa is 1; expected True or False"),
    "return_lse": ({"return_lse": "yes"}, TypeError, "return_lse is 'yes'; expected True or False"),
    "return_weights": ({"return_weights": None}, TypeError, "return_weights is None; expected True or False"),
    "layout word": ({"layout": "bshd"}, ValueError, 'layout is \'bshd\'; expected "bhld" or "blhd"'),
    "layout None": ({"layout": None}, TypeError, 'layout is None; expected "bhld" or "blhd"'),
    "threads 0": ({"num_threads": 0}, ValueError, "num_threads is 0; expected at least 1"),
    "threads negative": ({"num_threads": np.int8(-3)}, ValueError, "num_threads is -3; expected at least 1"),
    "threads float": ({"num_threads": 2.0}, TypeError, "num_threads is 2.0; expected an integer"),
    "threads bool": ({"num_threads": True}, TypeError, "num_threads is True; expected an integer"),
    "threads text": ({"num_threads": "2"}, TypeError, "num_threads is '2'; expected an integer"),
    "threads many": ({"num_threads": 1025}, ValueError, "num_threads is 1025; expected at most 1024"),
    "threads long": ({"num_threads": 10**5000}, ValueError, "num_threads is of type int; expected at most 1024"),
    # Masks.
    "mask int": (
        {"attn_mask": ones(3, 5, dtype="i8")},
        TypeError,
        f"attn_mask has dtype int64; {INTEGER_MASK}",
    ),
    "mask bytes": ({"attn_mask": ones(3, 5, dtype="u1")}, TypeError, f"attn_mask has dtype uint8; {INTEGER_MASK}"),
    "mask complex": (
        {"attn_mask": ones(3, 5, dtype="c16")},
        TypeError,
        f"attn_mask has dtype complex128; {MASK_DTYPES}",
    ),
    "mask longdouble": (
        {"attn_mask": ones(3, 5, dtype="g")},
        TypeError,
        f"attn_mask has dtype {np.dtype('g')}; {MASK_DTYPES}",
    ),
    "mask objects": ({"attn_mask": [[None] * 5]}, TypeError, f"attn_mask has dtype object; {MASK_DTYPES}"),
    "mask scalar": (
        {"attn_mask": True},
        ValueError,
        "attn_mask has shape (); expected one that broadcasts to (2, 4, 3, 5)",
    ),
    "mask shape": (
        {"attn_mask": ones(3, 4)},
        ValueError,
        "attn_mask has shape (3, 4); expected one that broadcasts to (2, 4, 3, 5)",
    ),
    "mask of the batch": (
        {"attn_mask": ones(2, 5, dtype=bool)},
        ValueError,
        "attn_mask has shape (2, 5); expected one that broadcasts to (2, 4, 3, 5)",
    ),
    "mask of kv heads": (
        {"key": ones(2, 2, 5, 6), "value": ones(2, 2, 5, 7), "enable_gqa": True, "attn_mask": ones(2, 3, 5)},
        ValueError,
        "attn_mask has shape (2, 3, 5); expected one that broadcasts to (2, 4, 3, 5)",
    ),
    "mask rank": (
        {"attn_mask": ones(1, 2, 4, 3, 5)},
        ValueError,
        "attn_mask has shape (1, 2, 4, 3, 5); expected one that broadcasts to (2, 4, 3, 5)",
    ),
    "mask of nothing": (
        {"attn_mask": ones(0)},
        ValueError,
        "attn_mask has shape (0,); expected one that broadcasts to (2, 4, 3, 5)",
    ),
    "mask of one head": (
        {"query": ones(3, 6), "key": ones(5, 6), "value": ones(5, 7), "attn_mask": ones(1, 3, 5)},
        ValueError,
        "attn_mask has shape (1, 3, 5); expected one that broadcasts to (3, 5)",
    ),
    # Lengths and offsets.
    "lengths scalar": ({"valid_lens": 3}, ValueError, f"valid_lens has shape (); {LENGTHS}"),
    "lengths shape": ({"valid_lens": [1, 2, 3]}, ValueError, f"valid_lens has shape (3,); {LENGTHS}"),
    "lengths of one": ({"valid_lens": [3]}, ValueError, f"valid_lens has shape (1,); {LENGTHS}"),
    "lengths of one query": ({"valid_lens": [[3], [2]]}, ValueError, f"valid_lens has shape (2, 1); {LENGTHS}"),
    "lengths for heads": (
        {"valid_lens": ones(2, 4, 3)},
        ValueError,
        f"valid_lens has shape (2, 4, 3); {LENGTHS}",
    ),
    "lengths of one head": (
        {"query": ones(3, 6), "key": ones(5, 6), "value": ones(5, 7), "valid_lens": [2]},
        ValueError,
        "valid_lens has shape (1,); expected () or (3,): the leading dimensions without heads, "
        "with or without the queries",
    ),
    "lengths NaN": ({"valid_lens": [3, math.nan]}, ValueError, "valid_lens holds NaN; expected numbers"),
    "lengths bool": (
        {"valid_lens": [True, False]},
        TypeError,
        "valid_lens has dtype bool; expected integers or floating numbers",
    ),
    "lengths complex": (
        {"valid_lens": [1j, 2]},
        TypeError,
        "valid_lens has dtype complex128; expected integers or floating numbers",
    ),
    "lengths None": (
        {"valid_lens": [None, 2]},
        TypeError,
        "valid_lens has dtype object; expected integers or floating numbers",
    ),
    "lengths text": (
        {"valid_lens": ["1", "2"]},
        TypeError,
        "valid_lens has dtype <U1; expected integers or floating numbers",
    ),
    "offset float": ({"q_offset": 1.0}, TypeError, "q_offset has dtype float64; expected integers"),
    "offset bool": ({"q_offset": True}, TypeError, "q_offset has dtype bool; expected integers"),
    "offset text": ({"q_offset": "1"}, TypeError, "q_offset has dtype <U1; expected integers"),
    "offset shape": (
        {"q_offset": [1, 2, 3]},
        ValueError,
        "q_offset has shape (3,); expected an int or (2,): the leading dimensions without heads",
    ),
    "offset for queries": (
        {"q_offset": ones(2, 3, dtype=int), "is_causal": True},
        ValueError,
        "q_offset has shape (2, 3); expected an int or (2,): the leading dimensions without heads",
    ),
    "offset beside lower_right": (
        {"q_offset": 2, "is_causal": "lower_right"},
        ValueError,
        'is_causal="lower_right" gives the offset; expected no q_offset beside it',
    ),
    "offset beside upper_left": (
        {"q_offset": 0, "is_causal": "upper_left"},
        ValueError,
        'is_causal="upper_left" gives the offset; expected no q_offset beside it',
    ),
    # out
    "out list": ({"out": [0.0]}, TypeError, "out is a list; expected a numpy.ndarray"),
    "out masked": (
        {"out": np.ma.zeros((2, 4, 3, 7))},
        TypeError,
        "out is a MaskedArray; expected a numpy.ndarray",
    ),
    "out dtype": ({"out": ones(2, 4, 3, 7, dtype="f4")}, TypeError, "out has dtype float32; expected float64"),
    "out swapped": ({"out": ones(2, 4, 3, 7, dtype=">f8")}, TypeError, "out has dtype >f8; expected float64"),
    "out integers": ({"out": ones(2, 4, 3, 7, dtype="i8")}, TypeError, "out has dtype int64; expected float64"),
    "out objects": ({"out": ones(2, 4, 3, 7, dtype="O")}, TypeError, "out has dtype object; expected float64"),
    "out shape": ({"out": ones(2, 4, 3, 6)}, ValueError, "out has shape (2, 4, 3, 6); expected (2, 4, 3, 7)"),
    "out rank": ({"out": ones(4, 3, 7)}, ValueError, "out has shape (4, 3, 7); expected (2, 4, 3, 7)"),
    "out larger": (
        {"out": ones(1, 2, 4, 3, 7)},
        ValueError,
        "out has shape (1, 2, 4, 3, 7); expected (2, 4, 3, 7)",
    ),
    "out layout": (
        {"layout": "blhd", "out": ones(2, 3, 4, 7), "query": ones(2, 4, 3, 6), "key": ones(2, 5, 3, 6)}
        | {"value": ones(2, 5, 3, 7)},
        ValueError,
        "out has shape (2, 3, 4, 7); expected (2, 4, 3, 7)",
    ),
    "out read-only": (
        {"out": np.broadcast_to(0.0, (2, 4, 3, 7))},
        ValueError,
        "out is read-only; expected a writable array",
    ),
    "out strides": (
        {"out": records((2, 4, 3, 7))},
        ValueError,
        f"out is unaligned or has strides {records((2, 4, 3, 7)).strides}; {ADDRESSABLE}",
    ),
    "out repeats": (
        {"out": np.lib.stride_tricks.as_strided(np.zeros(84), (2, 4, 3, 7), (0, 168, 56, 8))},
        ValueError,
        "out overlaps itself; expected every element in a place of its own",
    ),
    "out slides": (
        {"out": np.lib.stride_tricks.as_strided(np.zeros(200), (2, 4, 3, 7), (672, 168, 48, 8))},
        ValueError,
        "out overlaps itself; expected every element in a place of its own",
    ),
    "out is query": (shared(0), ValueError, "out shares memory with query; expected memory of its own"),
    "out undecided": (
        undecidable(),
        ValueError,
        "out shares memory with query; expected memory of its own",
    ),
}


@pytest.mark.parametrize("case", ATTENTION)
def test_attention(implementation, case):
    changes, kind, text = ATTENTION[case]
    arguments = base() | changes
    before = {name: snapshot(value) for name, value in arguments.items()}
    call = implementation.scaled_dot_product_attention
    assert raised(lambda: call(**arguments)) == (kind, text)
    assert {name: snapshot(value) for name, value in arguments.items()} == before


@pytest.mark.parametrize("name", ["query", "key", "value", "attn_mask", "valid_lens", "q_offset"])
def test_out_shares_memory_with_any_array(implementation, name):
    """An integer array can share memory with a floating one through a view."""
    memory = np.zeros(2 * 3 * 6 * 6)
    arrays = {
        "query": memory.reshape(2, 3, 6, 6),
        "key": memory.reshape(2, 3, 6, 6),
        "value": memory.reshape(2, 3, 6, 6),
        "attn_mask": memory[:36].reshape(6, 6),
        "valid_lens": memory[:2].view(np.int64),
        "q_offset": memory[-2:].view(np.int64),
    }
    arguments = {key: ones(2, 3, 6, 6) for key in ("query", "key", "value")}
    arguments |= {name: arrays[name], "out": memory.reshape(2, 3, 6, 6)}
    if name == "q_offset":
        arguments["is_causal"] = True
    got = raised(lambda: implementation.scaled_dot_product_attention(**arguments))
    assert got == (ValueError, f"out shares memory with {name}; expected memory of its own")
    assert not memory.any()


def test_out_beside_an_input_in_one_buffer(implementation):
    arguments = base() | shared(1)
    got = implementation.scaled_dot_product_attention(**arguments)
    assert got is arguments["out"]


@pytest.mark.parametrize("name", ["query", "key", "value", "attn_mask"])
def test_ragged_lists(implementation, name):
    arguments = base() | {name: [[1.0], [1.0, 2.0]]}
    kind, text = raised(lambda: implementation.scaled_dot_product_attention(**arguments))
    assert kind is ValueError
    assert text.startswith(f"{name} cannot be converted to an array: ")


class Broken:
    """An array-like whose conversion fails in a way of its own."""

    def __array__(self, dtype=None, copy=None):
        raise ZeroDivisionError("on purpose")


class OtherDevice:
    """What an array on an accelerator looks like from here."""

    def __dlpack__(self, **options):
        raise BufferError("on another device")

    def __dlpack_device__(self):
        return 2, 0


@pytest.mark.parametrize("name", ["query", "key", "value", "attn_mask", "valid_lens", "q_offset"])
@pytest.mark.parametrize("broken", [Broken, OtherDevice])
def test_conversions_that_fail(implementation, name, broken):
    arguments = base() | {name: broken()}
    kind, text = raised(lambda: implementation.scaled_dot_product_attention(**arguments))
    assert kind is TypeError
    assert text.startswith(f"{name} cannot be converted to an array: ")


@pytest.mark.parametrize("name", ["attn_mask", "scale", "layout", "out", "valid_lens"])
def test_unknown_and_positional_arguments(implementation, name):
    call = implementation.scaled_dot_product_attention
    arrays = list(base().values())
    assert raised(lambda: call(*arrays, **{name + "_": None}))[0] is TypeError
    assert raised(lambda: call(*arrays, None, 0.0, False, None))[0] is TypeError
    assert raised(lambda: call(*arrays[:2]))[0] is TypeError


def test_an_error_comes_before_the_warning(implementation):
    """A call that fails says so; it does not warn about its causal corner first."""
    arguments = base() | {"is_causal": True, "out": [0.0]}
    assert raised(lambda: implementation.scaled_dot_product_attention(**arguments))[0] is TypeError


# ---------------------------------------------------------------- what comes out of the checks


@pytest.mark.parametrize("ndim", [2, 3, 4, 5])
@pytest.mark.parametrize("layout", ["bhld", "blhd"])
@pytest.mark.parametrize("per_query", [False, True])
@pytest.mark.parametrize("is_causal", [False, True, "lower_right"])
@pytest.mark.parametrize("dtype", ["float32", ">f4", "int16"])
def test_a_call_is_final(ndim, layout, per_query, is_causal, dtype):
    """Every field has the type, dtype and rank that the implementations rely on."""
    lead, result = ((3, 2)[5 - ndim :], "float64" if dtype == "int16" else "float32")
    heads = (2,) if ndim > 2 else ()

    def array(length, width):
        shape = (*lead, *heads, length, width)
        array = np.broadcast_to(np.ones((), dtype), shape)
        return array.swapaxes(-3, -2) if layout == "blhd" and ndim > 2 else array

    out = array(3, 7).astype(result)
    call = _validate.attention_call_of(
        query=array(3, 6), key=array(5, 6), value=array(5, 7), attn_mask=np.ones(5, "f2"), dropout_p=0,
        is_causal=is_causal, scale=np.float32(2), enable_gqa=np.False_, layout=layout, return_lse=np.True_,
        valid_lens=np.full((*lead, 3) if per_query else lead, 2.5, "f4"), return_weights=False, out=out,
        q_offset=np.int8(1) if is_causal is True else None, num_threads=np.int16(2),
    )  # fmt: skip
    lead = call.query.shape[:-3]
    assert call.query.shape == (*lead, 2 if heads else 1, 3, 6)
    assert call.key.shape == (*lead, 2 if heads else 1, 5, 6)
    assert call.value.shape == (*lead, 2 if heads else 1, 5, 7)
    assert call.mask.shape == (*lead, 2 if heads else 1, 3, 5)
    assert call.out.shape == (*lead, 2 if heads else 1, 3, 7)
    assert call.shape == out.shape
    for field in (call.query, call.key, call.value, call.mask, call.lengths, call.offset, call.out):
        assert type(field) is np.ndarray
        assert field.dtype.isnative
        assert field.flags.aligned
    assert call.query.dtype == call.dtype == result
    assert call.mask.dtype == np.float32
    assert call.mask.strides[:-1] == (0,) * (call.mask.ndim - 1)
    assert (call.lengths.shape, call.lengths.dtype) == ((*lead, 3), np.int64)
    assert (call.offset.shape, call.offset.dtype) == (lead, np.int64)
    assert (call.lengths == 3).all()
    assert (call.offset == {False: 0, True: 1, "lower_right": 2 if per_query else 0}[is_causal]).all()
    assert call.out_object is out
    assert np.shares_memory(call.out, out)
    assert (type(call.causal), type(call.scale), type(call.return_lse)) == (bool, float, bool)
    assert (type(call.num_threads), call.num_threads) == (int, 2)
    assert call.num_head_axes == len(heads)


# ---------------------------------------------------------------- nothing ends the process


REPEATED = {
    "more elements than an array holds": ((2**20, 1, 2**20, 2), (2**20, 1, 3, 2), (1, 1, 3, 2**40)),
    "more bytes than an array holds": ((1, 1, 2**40, 2), (1, 1, 3, 2), (1, 1, 3, 2**20)),
    "products that wrap to 0": ((2**32, 1, 1, 2), (1, 1, 1, 2), (1, 1, 1, 2**32)),
    "queries beyond the address space": ((1, 1, 2**46, 1), (1, 1, 3, 1), (1, 1, 3, 1)),
    "batches beyond the address space": ((2**23, 1, 2**23, 1), (1, 1, 3, 1), (1, 1, 3, 1)),
    "values beyond the address space": ((1, 1, 1, 1), (1, 1, 1, 1), (1, 1, 1, 2**46)),
    "leads that multiply": ((2**40, 1, 1, 1, 2), (1, 2**40, 1, 1, 2), (1, 1, 1, 1, 2)),
}


@pytest.mark.parametrize("case", REPEATED)
@pytest.mark.parametrize("dtype", ["float64", "int32", ">f8"])
def test_sizes_that_no_memory_holds(implementation, case, dtype):
    """Views that repeat one number: the arguments are small, the result is not."""
    arrays = [np.broadcast_to(np.ones((), dtype), shape) for shape in REPEATED[case]]
    kind, text = raised(lambda: implementation.scaled_dot_product_attention(*arrays))
    assert issubclass(kind, (MemoryError, ValueError))
    assert text


def test_a_mask_that_no_array_holds(implementation):
    """One bias for each of 2**40 queries fits, and would be seen as 2**80 numbers."""
    arrays = [np.broadcast_to(1.0, (1, 2**40, width)) for width in (1, 1, 0)]
    mask = np.broadcast_to(np.float16(0), (2**40, 1))
    got = raised(lambda: implementation.scaled_dot_product_attention(*arrays, mask))
    assert got == (ValueError, f"attn_mask would have shape (1, {2**40}, {2**40}), more than an array can hold")


@pytest.mark.parametrize("dtype", ["O", "c8", "g", "S3", "U2", "M8[s]", "m8[s]", "V4", "i1,f4", "f2"])
@pytest.mark.parametrize("name", ["query", "key", "value", "attn_mask", "valid_lens", "q_offset", "out"])
@pytest.mark.parametrize("empty", [False, True])
def test_foreign_dtypes_never_end_the_process(implementation, dtype, name, empty):
    """A type or value error that names the argument, for full and for empty arrays."""
    shapes = {"attn_mask": (3, 5), "valid_lens": (2,), "q_offset": (2,), "out": (2, 4, 3, 7)}
    arguments = base()
    shape = shapes[name] if name in shapes else arguments[name].shape
    arguments[name] = np.zeros((0, *shape[1:]) if empty else shape, dtype)
    fine = (dtype == "f2" and name not in ("q_offset", "out")) or (dtype, name) == ("g", "valid_lens")
    if fine and not empty:
        assert implementation.scaled_dot_product_attention(**arguments).shape == (2, 4, 3, 7)
        return
    kind, text = raised(lambda: implementation.scaled_dot_product_attention(**arguments))
    assert kind in (TypeError, ValueError)
    assert name in text


@pytest.mark.parametrize("zeros", range(1, 64))
def test_empty_arrays_never_end_the_process(implementation, zeros):
    """Any of B, H, L, S, E and Ev, alone and together, with every option that reads them."""
    b, h, n, s, e, ev = (0 if zeros >> bit & 1 else 2 for bit in range(6))
    arguments = {"query": ones(b, h, n, e), "key": ones(b, h, s, e), "value": ones(b, h, s, ev)}
    options = {"attn_mask": ones(n, s), "valid_lens": np.full((b, n), 1), "is_causal": "lower_right"}
    for chosen in ({}, options, {"valid_lens": np.full(b, 1)}, {"attn_mask": ones(1, dtype=bool)}):
        out, lse, weights = implementation.scaled_dot_product_attention(
            **arguments, **chosen, return_lse=True, return_weights=True
        )
        assert out.shape == (b, h, n, ev)
        assert lse.shape == (b, h, n)
        assert weights.shape == (b, h, n, s)


@pytest.mark.parametrize("kv_heads", [0, 1, 3])
def test_no_query_heads_over_some_key_heads(implementation, kv_heads):
    """0 is a multiple of every number: an empty result."""
    arrays = ones(2, 0, 3, 6), ones(2, kv_heads, 5, 6), ones(2, kv_heads, 5, 7)
    assert implementation.scaled_dot_product_attention(*arrays, enable_gqa=True).shape == (2, 0, 3, 7)


# ---------------------------------------------------------------- the layer


def layer_of(implementation, **options):
    return implementation.MultiHeadAttention(8, 4, rng=0, **options)


CONSTRUCTOR = {
    "no multiple": (
        (10, 3),
        {},
        ValueError,
        "num_hiddens is 10 and num_heads is 3; expected num_hiddens to be a multiple of num_heads",
    ),
    "no hiddens": ((0, 1), {}, ValueError, "num_hiddens is 0; expected at least 1"),
    "heads long": (
        (8, 10**5000),
        {},
        ValueError,
        "num_hiddens is 8 and num_heads is of type int; expected num_hiddens to be a multiple of num_heads",
    ),
    "no heads": ((8, 0), {}, ValueError, "num_heads is 0; expected at least 1"),
    "negative heads": ((8, -2), {}, ValueError, "num_heads is -2; expected at least 1"),
    "float": ((8.0, 2), {}, TypeError, "num_hiddens is 8.0; expected an integer"),
    "bool": ((8, True), {}, TypeError, "num_heads is True; expected an integer"),
    "None": ((None, 2), {}, TypeError, "num_hiddens is None; expected an integer"),
    "text": (("8", 2), {}, TypeError, "num_hiddens is '8'; expected an integer"),
    "too many": (
        (2**40, 1),
        {},
        ValueError,
        f"W_q would have shape ({2**40}, {2**40}), more than an array can hold",
    ),
    "dropout 1": ((8, 2, 1.0), {}, ValueError, "dropout is 1.0; expected 0 <= dropout < 1"),
    "dropout negative": ((8, 2, -0.1), {}, ValueError, "dropout is -0.1; expected 0 <= dropout < 1"),
    "dropout NaN": ((8, 2, math.nan), {}, ValueError, "dropout is nan; expected a finite number"),
    "dropout text": ((8, 2, "half"), {}, TypeError, "dropout is 'half'; expected a real number"),
    "bias": ((8, 2, 0.0, 1), {}, TypeError, "bias is 1; expected True or False"),
    "kv heads": (
        (8, 4),
        {"num_kv_heads": 3},
        ValueError,
        "num_heads is 4 and num_kv_heads is 3; expected num_heads to be a multiple of num_kv_heads",
    ),
    "no kv heads": ((8, 4), {"num_kv_heads": 0}, ValueError, "num_kv_heads is 0; expected at least 1"),
    "kv heads float": ((8, 4), {"num_kv_heads": 2.0}, TypeError, "num_kv_heads is 2.0; expected an integer"),
    "dtype float16": ((8, 4), {"dtype": "float16"}, TypeError, "dtype is float16; expected float32 or float64"),
    "dtype int": ((8, 4), {"dtype": int}, TypeError, f"dtype is {np.dtype(int)}; expected float32 or float64"),
    "dtype word": (
        (8, 4),
        {"dtype": "single float"},
        TypeError,
        "dtype is 'single float'; expected float32 or float64",
    ),
    "rng text": ((8, 4), {"rng": "0"}, TypeError, "rng is '0'; expected None, an int or a numpy.random.Generator"),
    "rng bool": ((8, 4), {"rng": True}, TypeError, "rng is True; expected None, an int or a numpy.random.Generator"),
    "rng negative": ((8, 4), {"rng": -1}, ValueError, "rng is -1; expected a seed of at least 0"),
}


@pytest.mark.parametrize("case", CONSTRUCTOR)
def test_constructor(implementation, case):
    positional, options, kind, text = CONSTRUCTOR[case]
    np.random.seed(0)
    state = np.random.get_state()[1].copy()
    assert raised(lambda: implementation.MultiHeadAttention(*positional, **options)) == (kind, text)
    assert np.array_equal(np.random.get_state()[1], state), "a refused layer drew numbers"


def inputs():
    return {"queries": ones(2, 3, 8), "keys": ones(2, 5, 8), "values": ones(2, 5, 8)}


FORWARD = {
    "queries rank": (
        {"queries": ones(3, 8)},
        ValueError,
        "queries has shape (3, 8); expected 3 dimensions: (batch, length, width)",
    ),
    "keys rank": (
        {"keys": ones(1, 2, 5, 8)},
        ValueError,
        "keys has shape (1, 2, 5, 8); expected 3 dimensions: (batch, length, width)",
    ),
    "keys batch": ({"keys": ones(3, 5, 8)}, ValueError, "queries has batch 2 but keys has 3"),
    "values batch": ({"values": ones(1, 5, 8)}, ValueError, "queries has batch 2 but values has 1"),
    "values length": ({"values": ones(2, 4, 8)}, ValueError, "keys has length 5 but values has 4"),
    "queries width": (
        {"queries": ones(2, 3, 7)},
        ValueError,
        "queries has width 7 but W_q has shape (8, 8); expected width 8",
    ),
    "values width": (
        {"values": ones(2, 5, 9)},
        ValueError,
        "values has width 9 but W_v has shape (8, 8); expected width 8",
    ),
    "queries dtype": (
        {"queries": ones(2, 3, 8, dtype="c8")},
        TypeError,
        f"queries has dtype complex64; {BY_LAYERS}",
    ),
    "values float16": (
        {"values": ones(2, 5, 8, dtype="f2")},
        TypeError,
        f"values has dtype float16; {BY_LAYERS}",
    ),
    "lengths": (
        {"valid_lens": [1, 2, 3]},
        ValueError,
        f"valid_lens has shape (3,); {LENGTHS}",
    ),
    "lengths NaN": ({"valid_lens": [1, math.nan]}, ValueError, "valid_lens holds NaN; expected numbers"),
    "mask": (
        {"attn_mask": ones(2, 5)},
        ValueError,
        "attn_mask has shape (2, 5); expected one that broadcasts to (2, 4, 3, 5)",
    ),
    "mask int": ({"attn_mask": ones(3, 5, dtype="i4")}, TypeError, f"attn_mask has dtype int32; {INTEGER_MASK}"),
    "causal": ({"is_causal": "yes"}, ValueError, f"is_causal is 'yes'; {CAUSAL}"),
    "need_weights": ({"need_weights": 1}, TypeError, "need_weights is 1; expected True or False"),
    "out dtype": ({"out": ones(2, 3, 8, dtype="f4")}, TypeError, "out has dtype float32; expected float64"),
    "out shape": ({"out": ones(2, 5, 8)}, ValueError, "out has shape (2, 5, 8); expected (2, 3, 8)"),
    "out list": ({"out": []}, TypeError, "out is a list; expected a numpy.ndarray"),
    "out with a wrong mask": (
        {"out": ones(2, 3, 8), "valid_lens": [1]},
        ValueError,
        f"valid_lens has shape (1,); {LENGTHS}",
    ),
}


@pytest.mark.parametrize("case", FORWARD)
@pytest.mark.parametrize("way", ["forward", "__call__"])
def test_forward(implementation, case, way):
    changes, kind, text = FORWARD[case]
    arguments = inputs() | changes
    before = {name: snapshot(value) for name, value in arguments.items()}
    layer = layer_of(implementation)
    assert raised(lambda: getattr(layer, way)(**arguments)) == (kind, text)
    assert {name: snapshot(value) for name, value in arguments.items()} == before
    assert layer.attention_weights is None


WEIGHTS = {
    "W_q columns": ("W_q", ones(8, 4), ValueError, "W_q has shape (8, 4); expected (any, 8)"),
    "W_k columns": ("W_k", ones(8, 8), ValueError, "W_k has shape (8, 8); expected (any, 4)"),
    "W_v rank": ("W_v", ones(4), ValueError, "W_v has shape (4,); expected (any, 4)"),
    "W_o rows": ("W_o", ones(4, 8), ValueError, "W_o has shape (4, 8); expected (8, 8)"),
    "W_o columns": ("W_o", ones(8, 4), ValueError, "W_o has shape (8, 4); expected (8, 8)"),
    "W_q None": ("W_q", None, TypeError, f"W_q has dtype object; {BY_LAYERS}"),
    "W_o complex": ("W_o", ones(8, 8, dtype="c16"), TypeError, f"W_o has dtype complex128; {BY_LAYERS}"),
    "W_k rows": (
        "W_k",
        ones(7, 4),
        ValueError,
        "keys has width 8 but W_k has shape (7, 4); expected width 7",
    ),
    "b_q scalar": ("b_q", 0.0, ValueError, "b_q has shape (); expected (8,)"),
    "b_k size": ("b_k", ones(8), ValueError, "b_k has shape (8,); expected (4,)"),
    "b_o rank": ("b_o", ones(1, 8), ValueError, "b_o has shape (1, 8); expected (8,)"),
    "b_v objects": ("b_v", [None] * 4, TypeError, f"b_v has dtype object; {BY_LAYERS}"),
    "num_heads": (
        "num_heads",
        3,
        ValueError,
        "num_hiddens is 8 and num_heads is 3; expected num_hiddens to be a multiple of num_heads",
    ),
    "num_kv_heads": (
        "num_kv_heads",
        3,
        ValueError,
        "num_heads is 4 and num_kv_heads is 3; expected num_heads to be a multiple of num_kv_heads",
    ),
}


@pytest.mark.parametrize("case", WEIGHTS)
def test_replaced_weights(implementation, case):
    name, value, kind, text = WEIGHTS[case]
    layer = layer_of(implementation, num_kv_heads=2)
    setattr(layer, name, value)
    assert raised(lambda: layer(**inputs())) == (kind, text)


@pytest.mark.parametrize("name", ["queries", "keys", "values", "valid_lens", "attn_mask", "W_o", "b_o"])
def test_out_of_the_layer_shares_memory(implementation, name):
    memory = np.zeros(2 * 4 * 8)
    arrays = {
        "valid_lens": memory[:2].view(np.int64),
        "attn_mask": memory[:16].reshape(4, 4),
        "W_o": memory.reshape(8, 8),
        "b_o": memory[-8:],
    }
    layer = layer_of(implementation)
    arguments = dict.fromkeys(("queries", "keys", "values"), ones(2, 4, 8)) | {"out": memory.reshape(2, 4, 8)}
    array = arrays.get(name, arguments["out"])
    if name in ("W_o", "b_o"):
        setattr(layer, name, array)
    else:
        arguments[name] = array
    got = raised(lambda: layer(**arguments))
    assert got == (ValueError, f"out shares memory with {name}; expected memory of its own")
    assert not memory.any()


METHODS = {
    "transpose_qkv rank": (
        ("transpose_qkv", ones(3, 8)),
        "X has shape (3, 8); expected 3 dimensions: (batch, length, width)",
    ),
    "transpose_qkv width": (
        ("transpose_qkv", ones(2, 3, 7)),
        "X has width 7; expected a multiple of the depth 2",
    ),
    "transpose_output rank": (
        ("transpose_output", ones(8)),
        "X has shape (8,); expected 3 dimensions: (batch * num_heads, length, depth)",
    ),
    "transpose_output batch": (
        ("transpose_output", ones(6, 3, 2)),
        "X has 6 entries on its first axis; expected a multiple of the 4 heads",
    ),
    "method rank": (
        ("scaled_dot_product_attention", ones(2, 4, 3, 2), ones(8, 3, 2), ones(8, 3, 2)),
        "Q has shape (2, 4, 3, 2); expected 3 dimensions: (batch * heads, length, depth)",
    ),
    "method batch": (
        ("scaled_dot_product_attention", ones(8, 3, 2), ones(3, 3, 2), ones(8, 3, 2)),
        "Q has 8 entries on its first axis but K has 3",
    ),
    "method length": (
        ("scaled_dot_product_attention", ones(8, 3, 2), ones(8, 5, 2), ones(8, 4, 2)),
        "key has length 5 but value has 4",
    ),
    "method lengths": (
        ("scaled_dot_product_attention", ones(8, 3, 2), ones(8, 5, 2), ones(8, 5, 2), [5, 2]),
        "valid_lens has shape (2,); expected (8,) or (8, 3): the leading dimensions without heads, "
        "with or without the queries",
    ),
}


@pytest.mark.parametrize("case", METHODS)
def test_other_methods(implementation, case):
    (method, *arguments), text = METHODS[case]
    layer = layer_of(implementation)
    assert raised(lambda: getattr(layer, method)(*arguments)) == (ValueError, text)


@pytest.mark.parametrize("dtype", ["float16", "int64", "complex64", "O"])
def test_astype_refuses_other_dtypes(implementation, dtype):
    got = raised(lambda: layer_of(implementation).astype(dtype))
    assert got == (TypeError, f"dtype is {np.dtype(dtype)}; expected float32 or float64")


def test_a_batch_that_no_memory_holds(implementation):
    layer = layer_of(implementation)
    x = np.broadcast_to(1.0, (2**46, 1, 8))
    kind, _ = raised(lambda: layer(x, x, x))
    assert issubclass(kind, (MemoryError, ValueError))


# ---------------------------------------------------------------- the feed-forward network


NETWORK = {
    "hiddens": ((0, 4), {}, ValueError, "num_hiddens is 0; expected at least 1"),
    "ffn hiddens": ((4, 2.5), {}, TypeError, "ffn_num_hiddens is 2.5; expected an integer"),
    "too many": (
        (2**40, 2**40),
        {},
        ValueError,
        f"W_1 would have shape ({2**40}, {2**40}), more than an array can hold",
    ),
    "dtype": ((4, 4), {"dtype": "f2"}, TypeError, "dtype is float16; expected float32 or float64"),
    "rng": ((4, 4), {"rng": 1.5}, TypeError, "rng is 1.5; expected None, an int or a numpy.random.Generator"),
}


@pytest.mark.parametrize("case", NETWORK)
def test_network_constructor(implementation, case):
    positional, options, kind, text = NETWORK[case]
    assert raised(lambda: implementation.PositionWiseFFN(*positional, **options)) == (kind, text)


NETWORK_CALLS = {
    "scalar": (1.0, {}, ValueError, "X has shape (); expected at least 1 dimension: the width"),
    "width": (ones(2, 5), {}, ValueError, "X has width 5 but W_1 has shape (4, 6); expected width 4"),
    "dtype": (ones(2, 4, dtype="f2"), {}, TypeError, f"X has dtype float16; {BY_LAYERS}"),
    "W_1": (ones(2, 4), {"W_1": ones(4)}, ValueError, "W_1 has shape (4,); expected (any, any)"),
    "W_2": (ones(2, 4), {"W_2": ones(5, 4)}, ValueError, "W_2 has shape (5, 4); expected (6, any)"),
    "b_1": (ones(2, 4), {"b_1": ones(4)}, ValueError, "b_1 has shape (4,); expected (6,)"),
    "b_2": (ones(2, 4), {"b_2": ones(4, dtype="c8")}, TypeError, f"b_2 has dtype complex64; {BY_LAYERS}"),
}


@pytest.mark.parametrize("case", NETWORK_CALLS)
def test_network_calls(implementation, case):
    X, replaced, kind, text = NETWORK_CALLS[case]
    ffn = implementation.PositionWiseFFN(4, 6, rng=0)
    for name, value in replaced.items():
        setattr(ffn, name, value)
    assert raised(lambda: ffn(X)) == (kind, text)


# ---------------------------------------------------------------- thread counts


@pytest.mark.parametrize(
    "count, kind",
    [(0, ValueError), (-1, ValueError), (1025, ValueError), (True, TypeError), (1.0, TypeError), ("2", TypeError)],
)
def test_thread_counts(count, kind):
    before = mha_fast.get_num_threads()
    assert raised(lambda: mha_fast.set_num_threads(count))[0] is kind
    assert mha_fast.get_num_threads() == before
