"""Rotary positions: against complex numbers, the property that they are made for, and every wrong argument."""

import math

import ml_dtypes
import numpy as np
import pytest
from conftest import STORED, UNIT, draw

from mha_fast.reference import apply_rotary

PAIRINGS = pytest.mark.parametrize("interleaved", [False, True])
# The unit roundoff of the dtype of x.
ROUNDOFF = UNIT | {dtype: unit for dtype, (unit, _) in STORED.items()}


def turned(x, positions, base=10000.0, interleaved=False, dim=None):
    """The definition, in float64: pair p as a complex number times exp(i m base^(-2 p / dim))."""
    x = np.asarray(x).astype(np.float64)
    dim = dim or x.shape[-1]
    angles = np.asarray(positions, np.float64)[..., None] * base ** (-2 * np.arange(dim // 2) / dim)
    pairs = x[..., :dim].reshape(*x.shape[:-1], *((dim // 2, 2) if interleaved else (2, dim // 2)))
    pairs = pairs if interleaved else pairs.swapaxes(-1, -2)
    numbers = (pairs[..., 0] + 1j * pairs[..., 1]) * np.exp(1j * angles)
    parts = np.stack([numbers.real, numbers.imag], axis=-1 if interleaved else -2)
    return np.concatenate([parts.reshape(*x.shape[:-1], dim), x[..., dim:]], axis=-1)


@PAIRINGS
@pytest.mark.parametrize("dim", [None, 2, 8])
@pytest.mark.parametrize("dtype", ROUNDOFF)
def test_pairs_turn_as_complex_numbers(rng, dtype, dim, interleaved):
    x = draw(rng, 2, 3, 7, 10, dtype=dtype)
    before = x.copy()
    positions = rng.integers(0, 100_000, (2, 7))
    got = apply_rotary(x, positions, base=500.0, interleaved=interleaved, rotary_dim=dim)
    want = turned(x, positions[:, None], 500.0, interleaved, dim)
    assert got.dtype == x.dtype
    # cos, sin, two products and a sum in the dtype of the computation, and one rounding to what is stored. In float64
    # the angle itself, up to 1e5, has the rounding of its size.
    compute = "float64" if dtype == "float64" else "float32"
    limit = 4 * ROUNDOFF[compute] + ROUNDOFF[dtype] + 1e5 * 2.0**-52
    assert np.abs(got.astype(np.float64) - want).max() <= 2 * np.abs(want).max() * limit
    assert np.array_equal(got[..., dim or 10 :], x[..., dim or 10 :])
    assert np.array_equal(x, before)


@PAIRINGS
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_product_depends_on_the_difference_of_positions(rng, dtype, interleaved):
    q, k = draw(rng, 1, 64, dtype=dtype), draw(rng, 1, 64, dtype=dtype)
    for difference in (0, 1, 5, -300):
        products = [
            (
                apply_rotary(q, [m], interleaved=interleaved)
                @ apply_rotary(k, [m - difference], interleaved=interleaved).T
            )
            for m in (-1000, 0, 1, 17, 4096)
        ]
        limit = 64 * 8 * ROUNDOFF[dtype] * np.linalg.norm(q) * np.linalg.norm(k) + 1e-10
        assert np.ptp(products) <= limit


@PAIRINGS
def test_lengths_stay_and_the_opposite_position_undoes(rng, interleaved):
    x = draw(rng, 2, 3, 5, 16)
    positions = rng.uniform(-1e4, 1e4, 5)
    rotated = apply_rotary(x, positions, interleaved=interleaved)
    assert np.allclose(np.linalg.norm(rotated, axis=-1), np.linalg.norm(x, axis=-1), rtol=1e-14)
    assert np.allclose(apply_rotary(rotated, -positions, interleaved=interleaved), x, rtol=0, atol=1e-13)


def test_angles_are_exact_far_out():
    """In float32 the angle of position 2^24 + 1 would be that of its neighbour."""
    position = 2**24 + 1
    got = apply_rotary(np.array([[1, 0]], np.float32), [position])
    assert np.abs(got - [[math.cos(position), math.sin(position)]]).max() < 1e-6


def test_positions_broadcast_over_heads(rng):
    x = draw(rng, 2, 3, 4, 6)
    each = np.arange(8).reshape(2, 4)
    for positions, full in (
        (5, np.full((2, 3, 4), 5)),
        ([5], np.full((2, 3, 4), 5)),
        (each[0], np.broadcast_to(each[0], (2, 3, 4))),
        (each, np.broadcast_to(each[:, None], (2, 3, 4))),
        (each[:, :1], np.broadcast_to(each[:, None, :1], (2, 3, 4))),
    ):
        assert np.allclose(apply_rotary(x, positions), turned(x, full), rtol=0, atol=1e-13)
    assert np.array_equal(apply_rotary(x[0], each[0]), apply_rotary(x, each[0])[0])
    assert np.array_equal(apply_rotary(x[0, 0], each[0]), apply_rotary(x, each[0])[0, 0])


def test_position_0_gives_a_copy(rng):
    x = draw(rng, 3, 4)
    got = apply_rotary(x, 0)
    assert np.array_equal(got, x)
    assert not np.shares_memory(got, x)


def test_integers_become_float64_and_nothing_may_be_empty():
    assert apply_rotary(np.eye(2, dtype=int), [0, 1]).dtype == np.float64
    for shape in ((0, 3, 4, 6), (2, 3, 0, 6), (2, 3, 4, 0)):
        assert apply_rotary(np.ones(shape), np.arange(shape[2])).shape == shape


def test_numbers_that_are_not_finite_stay_in_their_pair():
    x = np.array([[np.nan, 1.0, 2.0, 3.0]])
    assert np.isnan(apply_rotary(x, [3])).tolist() == [[True, False, True, False]]
    assert np.isnan(apply_rotary(x, [3], interleaved=True)).tolist() == [[True, True, False, False]]


def test_angles_may_be_as_large_as_float64_holds():
    for base, position in ((1e-300, 1e100), (1e300, -1.7e308), (5e-324, 1)):
        assert np.isfinite(apply_rotary(np.ones((1, 6)), [position], base=base)).all()


X = np.ones((2, 3, 4, 6))
SUPPORTED = "float16, bfloat16, float32 and float64 are supported, bool and integers become float64"
TARGET = "expected one that broadcasts to (2, 4), the shape of x without heads and width"
with np.errstate(over="ignore"):  # where longdouble is float64, infinity
    FAR = np.full(4, 1e300, np.longdouble) ** 2
FINITE = "positions holds NaN or infinity in float64; expected finite numbers"
ANGLES = "expected angles, position * base ** (-2 p / rotary_dim), that float64 can hold"
ERRORS = {
    "x dtype": ({"x": X.astype("c16")}, TypeError, f"x has dtype complex128; {SUPPORTED}"),
    "x rank": ({"x": X[0, 0, 0]}, ValueError, "x has shape (6,); expected at least 2 dimensions: length and width"),
    "x odd": (
        {"x": X[..., :5]},
        ValueError,
        "the width is 5; expected an even one, or an even rotary_dim of less",
    ),
    "positions shape": ({"positions": np.arange(3)}, ValueError, f"positions has shape (3,); {TARGET}"),
    "positions per head": ({"positions": np.ones((2, 3, 4))}, ValueError, f"positions has shape (2, 3, 4); {TARGET}"),
    "positions NaN": ({"positions": [0, 1, 2, math.nan]}, ValueError, FINITE),
    "positions infinite": ({"positions": [0, 1, 2, -math.inf]}, ValueError, FINITE),
    "positions beyond float64": ({"positions": FAR}, ValueError, FINITE),
    "angles": (
        {"base": 1e-300, "positions": [0, 0, 0, -1e200]},
        ValueError,
        f"base is 1e-300 and a position 1e+200; {ANGLES}",
    ),
    "angles of the least base": (
        {"x": np.ones((4, 600)), "base": 5e-324},
        ValueError,
        f"base is 5e-324 and a position 3.0; {ANGLES}",
    ),
    "positions bool": (
        {"positions": [True] * 4},
        TypeError,
        "positions has dtype bool; expected integers or floating numbers",
    ),
    "positions bfloat16": (
        {"positions": np.ones(4, ml_dtypes.bfloat16)},
        TypeError,
        "positions has dtype bfloat16; expected integers or floating numbers",
    ),
    "base 0": ({"base": 0}, ValueError, "base is 0; expected a number above 0"),
    "base NaN": ({"base": math.nan}, ValueError, "base is nan; expected a finite number"),
    "base text": ({"base": "1"}, TypeError, "base is '1'; expected a real number"),
    "interleaved": ({"interleaved": 1}, TypeError, "interleaved is 1; expected True or False"),
    "rotary_dim odd": (
        {"rotary_dim": 3},
        ValueError,
        "rotary_dim is 3; expected an even number of at most the width 6",
    ),
    "rotary_dim wide": (
        {"rotary_dim": 8},
        ValueError,
        "rotary_dim is 8; expected an even number of at most the width 6",
    ),
    "rotary_dim huge": (
        {"rotary_dim": 10**5000},
        ValueError,
        "rotary_dim is of type int; expected an even number of at most the width 6",
    ),
    "rotary_dim 0": ({"rotary_dim": 0}, ValueError, "rotary_dim is 0; expected at least 1"),
    "rotary_dim float": ({"rotary_dim": 2.0}, TypeError, "rotary_dim is 2.0; expected an integer"),
}


@pytest.mark.parametrize("case", ERRORS)
def test_errors(case):
    changed, kind, text = ERRORS[case]
    with pytest.raises(kind) as info:
        apply_rotary(**({"x": X, "positions": np.arange(4)} | changed))
    assert str(info.value) == text
