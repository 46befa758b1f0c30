"""Builds mha_fast._core: the Cython file, the C driver and one object per instruction set, each with flags of its own.

Environment: MHA_FAST_OPENMP=0 builds for one thread, MHA_FAST_WERROR=1 makes warnings of the C core errors.
"""

import os
import sysconfig
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError, LinkError

# Instruction-set level: its architecture (None: every one), flags of gcc and clang, flags of MSVC.
AVX2 = ["-mavx2", "-mfma", "-mf16c"]
AVX512 = ["-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mprefer-vector-width=512"]
LEVELS = {
    "scalar": (None, [], []),
    "avx2": ("x86_64", AVX2, ["/arch:AVX2"]),
    "avx512": ("x86_64", AVX2 + AVX512, ["/arch:AVX512"]),
    "avx512_bf16": ("x86_64", AVX2 + AVX512 + ["-mavx512bf16"], ["/arch:AVX512"]),
    "neon": ("aarch64", [], []),
}
ARCHITECTURES = {"x86_64": "x86_64", "amd64": "x86_64", "aarch64": "aarch64", "arm64": "aarch64"}
# The core relies on infinities (masks), so no flag here may assume finite numbers. Products and sums are fused only
# where the core says so.
EVERY_OBJECT = {"unix": ["-O3", "-fvisibility=hidden", "-fno-lto"], "msvc": ["/O2"]}
CORE_OBJECT = {
    "unix": ["-std=c11", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-Wall", "-Wextra"],
    "msvc": ["/std:c11", "/W3"],
}
WERROR = {"unix": "-Werror", "msvc": "/WX"}
OPENMP = {"unix": "-fopenmp", "msvc": "/openmp"}


def core_sources(architecture, style):
    """The C files for one architecture: (path, flags of this file alone), and the macros that name the levels."""
    column = 2 if style == "msvc" else 1
    built = {name: row[0] in (None, architecture) for name, row in LEVELS.items()}
    files = [("src/mha.c", []), ("src/layer.c", []), ("src/cpu.c", [])]
    files += [(f"src/isa_{name}.c", row[column]) for name, row in LEVELS.items() if built[name]]
    return files, [(f"MHA_HAVE_{name.upper()}", str(int(built[name]))) for name in built]


class BuildCore(build_ext):
    def finalize_options(self):
        super().finalize_options()
        self.force = True  # objects of an earlier build may have had other flags or another compiler

    def build_extension(self, ext):
        style = "msvc" if self.compiler.compiler_type == "msvc" else "unix"
        machine = sysconfig.get_platform().rpartition("-")[2]
        files, macros = core_sources(ARCHITECTURES.get(machine, machine), style)
        openmp = self.openmp_flags(style)
        every = EVERY_OBJECT[style] + openmp
        if style == "unix" and "-g" not in os.environ.get("CFLAGS", "").split():
            every.append("-g0")
        werror = [WERROR[style]] if os.environ.get("MHA_FAST_WERROR") == "1" else []

        def compile_one(file):
            flags = every + CORE_OBJECT[style] + werror + file[1]
            return self.compiler.compile([file[0]], output_dir=self.build_temp, macros=macros, extra_postargs=flags)

        os.makedirs(os.path.join(self.build_temp, "src"), exist_ok=True)
        with ThreadPoolExecutor(1 if style == "msvc" else os.cpu_count()) as pool:
            ext.extra_objects += [made for objects in pool.map(compile_one, files) for made in objects]
        ext.define_macros += macros
        ext.extra_compile_args += every
        ext.extra_link_args += openmp if style == "unix" else []
        super().build_extension(ext)

    def openmp_flags(self, style):
        """The flag for OpenMP, or none where a program that uses it does not compile and link."""
        if os.environ.get("MHA_FAST_OPENMP") == "0":
            print("mha_fast: OpenMP is switched off by MHA_FAST_OPENMP=0; building for one thread")
            return []
        flags = [OPENMP[style]]
        with tempfile.TemporaryDirectory() as folder:
            source = Path(folder, "probe.c")
            source.write_text("#include <omp.h>\nint main(void) { return omp_get_max_threads() < 1; }\n")
            try:
                objects = self.compiler.compile([str(source)], output_dir=folder, extra_postargs=flags)
                link_flags = flags if style == "unix" else []
                self.compiler.link_executable(objects, "probe", output_dir=folder, extra_postargs=link_flags)
            except (CompileError, LinkError) as error:
                print(f"mha_fast: no OpenMP ({error}); building for one thread")
                return []
        return flags


def core_extension():
    import numpy

    ext = Extension(
        "mha_fast._core",
        ["mha_fast/_core.pyx"],
        include_dirs=["src", numpy.get_include()],
        define_macros=[(f"NPY_{x}", "NPY_2_0_API_VERSION") for x in ("NO_DEPRECATED_API", "TARGET_VERSION")],
        depends=sorted(map(str, [*Path("src").glob("*.[ch]"), *Path("mha_fast").glob("*.pxd")])),  # for the sdist
    )
    ext.cython_c_in_temp = True
    ext.cython_directives = {"language_level": 3, "binding": True, "freethreading_compatible": True}
    return ext


if __name__ == "__main__":
    setup(ext_modules=[core_extension()], cmdclass={"build_ext": BuildCore})
