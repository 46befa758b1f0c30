"""Compiles src/*.c with check.c into one program, each file with the flags that setup.py gives it, and runs it.

    python tests/kernels/run.py [--cc gcc] [--cflags=-fsanitize=address]
    python tests/kernels/run.py --cc aarch64-linux-gnu-gcc --runner "qemu-aarch64 -L /usr/aarch64-linux-gnu"

The architecture is the compiler's (-dumpmachine), so a cross compiler and a runner test another CPU's levels.
"""

import argparse
import os
import runpy
import shlex
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cc", default=os.environ.get("CC", "cc"), help="compiler, with options of its own")
    parser.add_argument("--cflags", default="", help="further flags for every file and the link")
    parser.add_argument("--runner", default="", help="command that runs the program")
    parser.add_argument("--no-openmp", action="store_true", help="leave -fopenmp out")
    args = parser.parse_args()

    build = runpy.run_path(str(ROOT / "setup.py"), run_name="setup")
    compiler = shlex.split(args.cc)
    target = subprocess.run([*compiler, "-dumpmachine"], check=True, text=True, capture_output=True).stdout
    machine = target.strip().split("-")[0]
    files, macros = build["core_sources"](build["ARCHITECTURES"].get(machine, machine), "unix")
    common = build["EVERY_OBJECT"]["unix"] + build["CORE_OBJECT"]["unix"] + ["-g", f"-I{ROOT / 'src'}"]
    if os.environ.get("MHA_FAST_WERROR") == "1":
        common.append("-Werror")
    common += [f"-D{name}={value}" for name, value in macros]
    everywhere = ([] if args.no_openmp else ["-fopenmp"]) + shlex.split(args.cflags)

    with tempfile.TemporaryDirectory() as folder:

        def compile_one(file):
            path, flags = file
            target = Path(folder, Path(path).stem + ".o")
            subprocess.run(
                [*compiler, *common, *flags, *everywhere, "-c", str(ROOT / path), "-o", str(target)], check=True
            )
            return str(target)

        with ThreadPoolExecutor(os.cpu_count()) as pool:
            objects = list(pool.map(compile_one, [*files, ("tests/kernels/check.c", [])]))
        program = str(Path(folder, "check"))
        subprocess.run([*compiler, *objects, *everywhere, "-lm", "-o", program], check=True)
        return subprocess.run([*shlex.split(args.runner), program]).returncode


if __name__ == "__main__":
    sys.exit(main())
