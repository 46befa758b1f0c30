"""The machine: what a reader needs to judge the numbers, and its limits, measured by probe.c."""

import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

import numpy as np

import mha_fast

HERE = Path(__file__).parent
# Width in bytes of the vectors of a level; others have no peak of their own here.
VECTOR_BYTES = {"scalar": 16, "neon": 16, "avx2": 32, "avx512": 64, "avx512_bf16": 64}
# They choose or slow the kernels of NumPy's BLAS; no run takes them over.
NOT_TAKEN_OVER = ("OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE")


def cpu_name():
    if Path("/proc/cpuinfo").exists():
        names = [x for x in Path("/proc/cpuinfo").read_text().splitlines() if x.startswith("model name")]
        if names:
            return names[0].partition(":")[2].strip()
    return platform.processor() or platform.machine()


def environment():
    """What was measured with what, as {name: value}."""
    commit = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=HERE, capture_output=True, text=True)
    config = mha_fast.show_config()
    blas = np.show_config(mode="dicts")["Build Dependencies"]["blas"]
    return {
        "mha_fast": f"{config['version']} ({commit.stdout.strip() or 'unknown commit'}), level {config['level']}, "
        f"{config['compiler']}, OpenMP {config['openmp']}",
        "cpu": f"{cpu_name()}, {os.cpu_count()} logical, {config['num_threads']} usable",
        "python": platform.python_version(),
        "numpy": f"{np.__version__}, {blas.get('name')} {blas.get('version')}",
    }


def one_line(about):
    """The environment as a sentence for a picture or a page."""
    return "; ".join(f"{name} {value}" for name, value in about.items() if name not in ("pools",))


class Probe:
    """The limits, measured on demand. `missing` says why there are none."""

    def __init__(self):
        compiler = os.environ.get("CC") or next(filter(shutil.which, ("cc", "gcc", "clang")), None)
        self.missing = None if compiler else "no compiler"
        if not compiler:
            return
        self.folder = tempfile.TemporaryDirectory()
        program = str(Path(self.folder.name, "probe"))
        native = "-mcpu=native" if platform.machine() in ("aarch64", "arm64") else "-march=native"
        command = [*compiler.split(), "-O3", native, "-fopenmp", str(HERE / "probe.c"), "-o", program]
        made = subprocess.run(command, capture_output=True, text=True)
        if made.returncode:
            self.missing = f"{compiler} does not compile the probe: {made.stderr.strip().splitlines()[-1:]}"
            return
        self.process = subprocess.Popen(
            [program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env=os.environ | {"OMP_WAIT_POLICY": "passive"},
        )  # fmt: skip

    def measure(self, what, threads, level):
        """GFLOP/s of float32 ("fma") or of pairs of bfloat16 ("dot") with the vectors of a level, or GB/s ("read").

        None where there is no probe, or where its compiler lacks the instruction.
        """
        if self.missing:
            return None
        print(what, VECTOR_BYTES.get(level, 16), threads, file=self.process.stdin, flush=True)
        return float(self.process.stdout.readline()) or None

    def close(self):
        if not self.missing:
            self.process.stdin.close()
            self.process.wait()
            self.folder.cleanup()
