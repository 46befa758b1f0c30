"""Where the time of a call goes, from calls that differ in one thing: `python -m bench.shares [--write docs/fast.md]`.

On one thread, so that waiting is no part of it. Each share is a difference or a slope of measured times; calls that are
compared take turns.
"""

import argparse
from dataclasses import replace
from pathlib import Path

import numpy as np

import mha_fast
from bench.cases import Case
from bench.contestants import of_module
from bench.fill import fill
from bench.machine import Probe, environment, one_line
from bench.workers import seconds
from mha_fast import _config, _core

ROUNDS = 9
BASE = Case("base", 1, 4, 1024, 1024, 64)
LAYER = Case("layer", 8, 12, 128, 128, 32, kind="layer")


def compare(calls):
    """Best seconds of each call; the calls take turns. (Differences of medians would hold the noise of both.)"""
    numbers = {}
    for name, call in calls.items():
        call()
        numbers[name] = max(1, int(4e-3 / max(seconds(call, 1), 1e-7)))
    times = {name: [] for name in calls}
    for _ in range(ROUNDS):
        for name, call in calls.items():
            times[name].append(seconds(call, numbers[name]))
    return {name: min(t) for name, t in times.items()}


def call_of(case):
    return of_module(mha_fast, case)


def attention(query, key, value, **options):
    return lambda: mha_fast.scaled_dot_product_attention(query, key, value, **options)


def percent(x):
    return f"{x:.0%}"


def products(probe, level):
    """Slopes in head_dim and value_dim are the two products; the exponential runs alone over as many scores."""
    rng = np.random.default_rng(0)
    case = BASE

    def sized(head_dim, value_dim):
        query, key = (
            rng.standard_normal((1, case.num_heads, n, head_dim), np.float32) for n in (case.q_len, case.kv_len)
        )
        return attention(query, key, rng.standard_normal((1, case.num_heads, case.kv_len, value_dim), np.float32))

    scores = rng.uniform(-20, 0, 48 * 256).astype(np.float32)
    number = _config.level
    times = compare(
        {
            "whole": sized(64, 64), "deep": sized(96, 64), "shallow": sized(32, 64),
            "wide": sized(64, 96), "narrow": sized(64, 32),
            "exp": lambda: _core.exp2(scores, number),
            "short": call_of(replace(case, kv_len=256)), "shorter": call_of(replace(case, kv_len=128)),
        }
    )  # fmt: skip
    whole = times["whole"]
    pairs = case.num_heads * case.q_len * case.kv_len
    found = {
        "scores": times["deep"] - times["shallow"],
        "output": times["wide"] - times["narrow"],
        "exp": times["exp"] / scores.size * pairs,
    }
    # From 128 to 256 keys a panel does twice the work; what does not grow is its opening and closing.
    panel = 2 * times["shorter"] - times["short"]
    found["panel"] = max(panel, 0.0)
    rest = 1 - sum(found.values()) / whole
    texts = {f"{name}-share": percent(t / whole) for name, t in found.items()}
    texts["rest-share"] = percent(rest) if rest > 0 else f"hidden (the steps overlap by {-rest:.0%})"
    peak = probe.measure("fma", 1, level)
    texts["tile"] = percent(case.flops() / whole / 1e9 / peak) if peak else f"(not measured: {probe.missing})"
    return texts


def skipping():
    square = Case("square", 1, 4, 1024, 1024, 64)
    mask = np.zeros((1024, 1024), bool)
    mask[:, 768:] = True
    options = {"full": {}, "causal": {"is_causal": True}, "half": {"valid_lens": np.array([512])}}
    options |= {"sparse": {"attn_mask": mask}, "ones": {"attn_mask": np.ones((1024, 1024), bool)}}
    options["zeros"] = {"attn_mask": np.zeros((1024, 1024), np.float32)}
    (query, key, value), _, _ = square.arrays()
    times = compare({name: attention(query, key, value, **given) for name, given in options.items()})
    return {
        f"skip-{name}": percent(times[name] / times["full"]) for name in ("causal", "half", "sparse", "ones", "zeros")
    }


def ahead():
    """Heads whose keys and values come from memory beside heads that share one in the cache."""
    case = Case("ahead", 16, 16, 128, 128, 64)
    (query, key, value), _, _ = case.arrays()
    one = [np.broadcast_to(x[:1, :1], x.shape) for x in (query, key, value)]
    times = compare({"all": attention(query, key, value), "one": attention(*one)})
    return {"ahead": percent(times["all"] / times["one"] - 1)}


def decode(probe):
    case = Case("decode", 1, 32, 1, 8192, 128, num_kv_heads=8)
    times = compare({"group": call_of(case), "single": call_of(replace(case, num_heads=8, num_kv_heads=0))})
    read = probe.measure("read", 1, mha_fast.show_config()["level"])
    share = percent(case.kv_bytes() / times["group"] / 1e9 / read) if read else f"(not measured: {probe.missing})"
    return {"decode": share, "decode-group": percent(times["group"] / times["single"])}


def layer():
    """Attention alone; and what does not grow with the batch: packing the weights."""
    n = LAYER.batch
    few = [call_of(replace(LAYER, batch=b)) for b in (n, 2 * n)]
    attend = call_of(replace(LAYER, kind="attention"))
    times = compare({"layer": few[0], "double": few[1], "attention": attend})
    packing = max(2 * times["layer"] - times["double"], 0.0)
    rest = times["layer"] - times["attention"] - packing
    flops = LAYER.flops() - replace(LAYER, kind="attention").flops()
    return {
        "layer-attention": percent(times["attention"] / times["layer"]),
        "layer-packing": percent(packing / times["layer"]),
        "layer-products": percent(rest / times["layer"]),
    }, flops / rest


def calls():
    """Microseconds of the smallest calls, through both ways into the core."""
    rng = np.random.default_rng(0)
    tiny = rng.standard_normal((1, 1, 1, 4), np.float32)
    validated = rng.standard_normal((1, 4), np.float32)  # two dimensions: through the validator
    empty = np.empty
    times = compare(
        {
            "plain": attention(tiny, tiny, tiny),
            "validated": attention(validated, validated, validated),
            "empty": lambda: empty((1, 1, 1, 4), np.float32),
        }
    )
    return {f"call-{name}": f"{t * 1e6:.2f} µs" for name, t in times.items()}


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", type=Path, metavar="PAGE", help="put the numbers into this page")
    args = parser.parse_args(arguments)
    about = one_line(environment())
    mha_fast.set_num_threads(1)
    level, probe = mha_fast.show_config()["level"], Probe()
    texts = products(probe, level) | skipping() | ahead() | decode(probe) | calls()
    shares, product_rate = layer()
    peak = probe.measure("fma", 1, level)
    rate = percent(product_rate / 1e9 / peak) if peak else f"(not measured: {probe.missing})"
    texts |= shares | {"layer-rate": rate, "environment": about}
    probe.close()
    for name, text in texts.items():
        print(f"{name:18} {text}")
    if args.write:
        fill(args.write, texts)


if __name__ == "__main__":
    main()
