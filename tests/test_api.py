"""What a user can see: names, signatures, attributes, help, docstrings, the causal warning."""

import copy
import doctest
import inspect
import pickle
import pydoc
import warnings

import numpy as np
import pytest

import mha_fast
from mha_fast import _validate, _validate_sequences, reference, sequences

FUNCTIONS = ("alibi_slopes", "scaled_dot_product_attention")
CLASSES = ("MultiHeadAttention", "PositionWiseFFN")
# Threads and levels are the fast implementation's alone.
FAST_ONLY = {"get_num_threads", "set_num_threads", "show_config"}
IMPLEMENTATIONS = {"fast": mha_fast, "reference": reference}


@pytest.fixture(params=IMPLEMENTATIONS)
def implementation(request):
    return IMPLEMENTATIONS[request.param]


def public(thing):
    return {name for name in dir(thing) if not name.startswith("_")}


def parameters(thing):
    """What a call sees of a signature."""
    return [(p.name, p.kind, p.default) for p in inspect.signature(thing).parameters.values()]


def methods(cls):
    return sorted(name for name in public(cls) if callable(getattr(cls, name)))


CHECKS = [
    ("scaled_dot_product_attention", _validate.attention_call),
    ("varlen_attention", _validate_sequences.varlen_call),
    ("attention_with_kvcache", _validate_sequences.cache_call),
]
METHODS = [(c, m) for c in CLASSES for m in [*methods(getattr(reference, c)), "__init__", "__call__"]]
OBJECTS = [*FUNCTIONS, *CLASSES]


def instance(module, name):
    return {"MultiHeadAttention": lambda: module.MultiHeadAttention(8, 2, rng=0),
            "PositionWiseFFN": lambda: module.PositionWiseFFN(8, 4, rng=0)}[name]()  # fmt: skip


# ---------------------------------------------------------------- one interface


def test_the_reference_has_every_name_of_the_computation():
    assert set(mha_fast.__all__) - FAST_ONLY == set(reference.__all__) == set(OBJECTS) | set(sequences.__all__)


def test_every_promised_name_exists(implementation):
    for name in implementation.__all__:
        assert hasattr(implementation, name), name


def test_a_version():
    assert mha_fast.__version__[0].isdigit()


@pytest.mark.parametrize("name", OBJECTS)
def test_signatures_are_equal(name):
    fast, slow = getattr(mha_fast, name), getattr(reference, name)
    assert parameters(fast) == parameters(slow)
    assert str(inspect.signature(fast)) == str(inspect.signature(slow))


@pytest.mark.parametrize("cls, method", METHODS)
def test_signatures_of_methods_are_equal(cls, method):
    fast, slow = (getattr(getattr(module, cls), method) for module in (mha_fast, reference))
    assert parameters(fast) == parameters(slow)


def test_the_signature_of_attention():
    """Written out once: a change here is a change for every user."""
    assert str(inspect.signature(reference.scaled_dot_product_attention)) == (
        "(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, *, scale=None, enable_gqa=False, "
        "valid_lens=None, q_offset=None, window_size=(-1, -1), softcap=0.0, alibi_slopes=None, sinks=None, "
        "layout='bhld', return_lse=False, return_weights=False, weights_rows=None, out=None, num_threads=None)"
    )


@pytest.mark.parametrize("name, check", CHECKS)
def test_the_checks_take_options_by_name_alone_and_in_the_public_order(name, check):
    """And have no defaults of their own: what a caller forgets to hand on is an error."""
    public, checked = parameters(getattr(reference, name)), parameters(check)
    assert [p[0] for p in checked] == [p[0] for p in public]
    assert {kind for _, kind, _ in checked[3:]} == {inspect.Parameter.KEYWORD_ONLY}
    assert {default for _, _, default in checked} == {inspect.Parameter.empty}


def test_the_defaults_that_other_callers_get_are_the_public_ones():
    public = parameters(reference.scaled_dot_product_attention)
    assert _validate._DEFAULTS == {name: default for name, _, default in public[3:]}


def test_the_signatures_of_the_layers():
    layer, network = reference.MultiHeadAttention, reference.PositionWiseFFN
    assert str(inspect.signature(layer)) == (
        "(num_hiddens, num_heads, dropout=0.0, bias=False, *, num_kv_heads=None, dtype=None, rng=None)"
    )
    forward = (
        "(self, queries, keys, values, valid_lens=None, *, attn_mask=None, is_causal=False, "
        "need_weights=False, out=None)"
    )
    assert str(inspect.signature(layer.forward)) == forward
    assert str(inspect.signature(layer.__call__)) == forward
    assert str(inspect.signature(layer.scaled_dot_product_attention)) == "(self, Q, K, V, valid_lens=None)"
    assert str(inspect.signature(network)) == "(num_hiddens, ffn_num_hiddens, *, dtype=None, rng=None)"


@pytest.mark.parametrize("name", CLASSES)
def test_instances_have_the_same_attributes(name):
    fast, slow = instance(mha_fast, name), instance(reference, name)
    assert public(fast) == public(slow)
    for attribute in public(fast):
        a, b = getattr(fast, attribute), getattr(slow, attribute)
        if callable(a):
            continue
        assert type(a) is type(b), attribute
        assert np.array_equal(a, b) if isinstance(a, np.ndarray) else a == b, attribute


def test_the_attributes_of_a_layer(implementation):
    layer = instance(implementation, "MultiHeadAttention")
    assert {n for n in public(layer) if not callable(getattr(layer, n))} == {
        "W_q", "W_k", "W_v", "W_o", "b_q", "b_k", "b_v", "b_o", "num_hiddens", "num_heads", "num_kv_heads",
        "d_k", "d_v", "dropout", "attention_weights",
    }  # fmt: skip


@pytest.mark.parametrize("name", CLASSES)
def test_layers_can_be_copied_and_pickled(implementation, name):
    layer = instance(implementation, name)
    x = np.ones((2, 3, 8))
    arguments = (x, x, x) if name == "MultiHeadAttention" else (x,)
    want = layer(*arguments)
    for twin in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert type(twin) is type(layer)
        assert np.array_equal(twin(*arguments), want)


def test_astype_keeps_the_class(implementation):
    layer = instance(implementation, "MultiHeadAttention")
    assert type(layer.astype("float32")) is implementation.MultiHeadAttention


def test_a_subclass_may_replace_forward(implementation):
    class Doubled(implementation.MultiHeadAttention):
        def forward(self, *arguments, **options):
            return 2 * super().forward(*arguments, **options)

    x = np.ones((1, 3, 8))
    layer = Doubled(8, 2, rng=0)
    assert np.array_equal(layer(x, x, x), 2 * instance(implementation, "MultiHeadAttention")(x, x, x))


# ---------------------------------------------------------------- documentation


@pytest.mark.parametrize("name", OBJECTS)
def test_help_works(implementation, name):
    text = pydoc.render_doc(getattr(implementation, name), renderer=pydoc.plaintext)
    assert name in text
    for parameter in inspect.signature(getattr(implementation, name)).parameters:
        assert parameter in text


@pytest.mark.parametrize("name", OBJECTS)
def test_docstrings_have_their_sections(implementation, name):
    text = inspect.getdoc(getattr(implementation, name))
    for section in ("Parameters", "Raises", "Examples"):
        assert f"\n{section}\n---" in text, section
    for parameter in inspect.signature(getattr(implementation, name)).parameters:
        assert parameter in text, parameter


@pytest.mark.parametrize("cls, method", METHODS)
def test_methods_have_docstrings(implementation, cls, method):
    assert inspect.getdoc(getattr(getattr(implementation, cls), method))


def test_the_other_functions_have_docstrings():
    for name in FAST_ONLY:
        assert inspect.getdoc(getattr(mha_fast, name)), name
    assert inspect.getdoc(mha_fast)


def test_the_examples_of_the_reference_run():
    result = doctest.testmod(reference)
    assert result.attempted > 20
    assert result.failed == 0


# ---------------------------------------------------------------- the causal warning


def rectangle(queries=3, keys=5):
    return np.ones((1, queries, 4)), np.ones((1, keys, 4)), np.ones((1, keys, 4))


def test_the_warning_says_what_to_write(implementation):
    with pytest.warns(UserWarning) as caught:
        implementation.scaled_dot_product_attention(*rectangle(), is_causal=True)
    text = str(caught[0].message)
    for spelling in ("is_causal=True", 'is_causal="lower_right"', "q_offset=", 'is_causal="upper_left"'):
        assert spelling in text


def test_the_warning_comes_once_per_call_site(implementation):
    """Whatever the sizes: a decoder's cache grows from call to call."""
    call = implementation.scaled_dot_product_attention
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        for keys in (5, 6, 7):
            call(*rectangle(3, keys), is_causal=True)
        call(*rectangle(), is_causal=True)
    assert len(caught) == 2
    assert {warning.filename for warning in caught} == {__file__}
    first, second = (warning.lineno for warning in caught)
    assert second == first + 1


def test_the_warning_of_a_layer_names_the_users_line(implementation):
    layer = instance(implementation, "MultiHeadAttention")
    x, y = np.ones((1, 3, 8)), np.ones((1, 5, 8))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        line = inspect.currentframe().f_lineno + 1
        layer(x, y, y, is_causal=True)
        layer.forward(x, y, y, is_causal=True)
    assert [(warning.filename, warning.lineno) for warning in caught] == [(__file__, line), (__file__, line + 1)]


def test_a_warning_made_an_error_leaves_out_alone(implementation):
    out = np.full((1, 3, 4), 7.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning, match="upper-left"):
            implementation.scaled_dot_product_attention(*rectangle(), is_causal=True, out=out)
    assert (out == 7.0).all()


@pytest.mark.parametrize(
    "sizes, options",
    [
        ((3, 5), {"is_causal": "upper_left"}),
        ((3, 5), {"is_causal": "lower_right"}),
        ((3, 5), {"is_causal": True, "q_offset": 0}),
        ((3, 5), {"is_causal": False}),
        ((5, 5), {"is_causal": True}),
        ((5, 3), {"is_causal": True}),
    ],
)
def test_no_warning_where_it_is_clear(implementation, sizes, options):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        implementation.scaled_dot_product_attention(*rectangle(*sizes), **options)


def test_numpy_booleans_are_booleans(implementation):
    with pytest.warns(UserWarning, match="upper-left"):
        got = implementation.scaled_dot_product_attention(*rectangle(), is_causal=np.True_)
    assert np.array_equal(got, np.ones((1, 3, 4)))


def test_upper_left_is_true_without_the_warning(implementation, rng):
    arrays = [rng.standard_normal(a.shape) for a in rectangle()]
    with pytest.warns(UserWarning, match="upper-left"):
        want = implementation.scaled_dot_product_attention(*arrays, is_causal=True)
    assert np.array_equal(implementation.scaled_dot_product_attention(*arrays, is_causal="upper_left"), want)


# ---------------------------------------------------------------- threads and configuration


def test_set_num_threads_and_back():
    default = mha_fast.get_num_threads()
    assert isinstance(default, int)
    assert default >= 1
    try:
        mha_fast.set_num_threads(np.int64(3))
        assert mha_fast.get_num_threads() == (3 if mha_fast.show_config()["openmp"] else 1)
    finally:
        mha_fast.set_num_threads(None)
    assert mha_fast.get_num_threads() == default


@pytest.mark.parametrize("count", [None, 1, 3, np.int16(2), np.array(2)])
def test_num_threads_changes_nothing(implementation, rng, count):
    arrays = [rng.standard_normal((2, 9, 4)) for _ in range(3)]
    want = implementation.scaled_dot_product_attention(*arrays)
    got = implementation.scaled_dot_product_attention(*arrays, num_threads=count)
    assert np.array_equal(got, want)


def test_show_config_is_a_dict():
    assert isinstance(mha_fast.show_config(), dict)
