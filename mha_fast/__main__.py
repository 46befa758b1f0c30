"""Demonstration: the worked example through both implementations, a short table of times, and show_config().

python -m mha_fast [--threads N] [--json]
"""

import argparse
import json
import statistics
import time

import numpy as np

import mha_fast
from mha_fast import reference

# label, batch, num_heads, num_kv_heads, q_len, kv_len, head_dim, options
SIZES = [
    ("worked example", 2, 5, 5, 4, 6, 20, {}),
    ("sentence encoder", 32, 12, 12, 64, 64, 32, {}),
    ("BERT base", 4, 12, 12, 512, 512, 64, {}),
    ("BERT base, ragged", 4, 12, 12, 512, 512, 64, {"valid_lens": [512, 300, 200, 64]}),
    ("vision transformer", 8, 12, 12, 197, 197, 64, {}),
    ("GPT-2, causal", 1, 12, 12, 1024, 1024, 64, {"is_causal": True}),
    ("one token of Llama 3 8B", 1, 32, 8, 1, 4096, 128, {"enable_gqa": True}),
]
SECONDS_PER_ROW = 1.0
PAUSE = 0.1  # seconds in which the other implementation's thread pool stops spinning


def worked_example():
    """100 hidden units, 5 heads, lengths 3 and 2: the output's shape and the largest difference of the two classes."""
    outputs = []
    for module in (mha_fast, reference):
        np.random.seed(0)
        attention = module.MultiHeadAttention(num_hiddens=100, num_heads=5, dropout=0.5)
        queries, keys = np.random.rand(2, 4, 100), np.random.rand(2, 6, 100)
        outputs.append(attention(queries, keys, keys, valid_lens=np.array([3, 2])))
    fast, plain = outputs
    return {
        "shape": list(fast.shape),
        "largest_difference": float(np.abs(fast - plain).max()),
        "largest_output": float(np.abs(plain).max()),
    }


def seconds(call, number):
    start = time.perf_counter()
    for _ in range(number):
        call()
    return (time.perf_counter() - start) / number


def compare(label, batch, num_heads, num_kv_heads, q_len, kv_len, head_dim, options):
    """Median time of one call of each implementation; the two take turns."""
    rng = np.random.default_rng(0)
    query = rng.standard_normal((batch, num_heads, q_len, head_dim), dtype=np.float32)
    key, value = rng.standard_normal((2, batch, num_kv_heads, kv_len, head_dim), dtype=np.float32)
    calls = [
        lambda module=module: module.scaled_dot_product_attention(query, key, value, **options)
        for module in (mha_fast, reference)
    ]
    difference = float(np.abs(calls[0]() - calls[1]()).max())
    numbers = [max(1, int(0.01 / seconds(call, 1))) for call in calls]
    times = [[], []]
    end = time.perf_counter() + SECONDS_PER_ROW
    while time.perf_counter() < end or len(times[0]) < 2:
        for call, number, taken in zip(calls, numbers, times, strict=True):
            time.sleep(PAUSE)
            call()
            taken.append(seconds(call, number))
    fast, plain = map(statistics.median, times)
    heads = f"{num_heads}" if num_heads == num_kv_heads else f"{num_heads} on {num_kv_heads}"
    return {
        "case": label,
        "sizes": f"{batch} x {heads} x {q_len} x {kv_len} x {head_dim}",
        "fast_ms": fast * 1e3,
        "reference_ms": plain * 1e3,
        "speed_up": plain / fast,
        "largest_difference": difference,
    }


def main(arguments=None):
    parser = argparse.ArgumentParser(prog="python -m mha_fast", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--threads", type=int, metavar="N", help="threads of mha_fast (NumPy keeps its own count)")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    args = parser.parse_args(arguments)
    if args.threads is not None:
        try:
            mha_fast.set_num_threads(args.threads)
        except ValueError as error:
            parser.error(str(error))

    example = worked_example()
    if args.json:
        table = [compare(*row) for row in SIZES]
        result = {"worked_example": example, "table": table, "config": mha_fast.show_config()}
        print(json.dumps(result, indent=1, default=str))
        return
    print("Worked example: 100 hidden units, 5 heads, queries (2, 4, 100), keys = values (2, 6, 100), lengths 3 and 2")
    print(f"  output {tuple(example['shape'])}, largest difference of mha_fast and its reference "
          f"{example['largest_difference']:.1e} (outputs up to {example['largest_output']:.0f})\n")  # fmt: skip
    sizes = "batch x heads x q x kv x depth"
    print(f"{'float32 attention':24} {sizes:>32} {'mha_fast':>12} {'reference':>12} {'ratio':>7}")
    for row in SIZES:
        line = compare(*row)
        print(f"{line['case']:24} {line['sizes']:>32} {line['fast_ms']:9.3f} ms {line['reference_ms']:9.3f} ms "
              f"{line['speed_up']:6.1f}x", flush=True)  # fmt: skip
    print("\nshow_config()")
    for name, value in mha_fast.show_config().items():
        print(f"  {name}: {value}")


if __name__ == "__main__":
    main()
