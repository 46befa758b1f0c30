/* Detection of CPU and operating system, the floating-point control register. Built for the architecture's baseline. */
#include "cpu.h"

#if defined(__x86_64__) || defined(_M_X64)

#include <immintrin.h>
#if defined(_MSC_VER)
#include <intrin.h>
static void cpuid(unsigned leaf, unsigned subleaf, unsigned r[4]) { __cpuidex((int *)r, (int)leaf, (int)subleaf); }
static uint64_t xgetbv(void) { return _xgetbv(0); }
#else
#include <cpuid.h>
static void cpuid(unsigned leaf, unsigned subleaf, unsigned r[4])
{
    if (!__get_cpuid_count(leaf, subleaf, r, r + 1, r + 2, r + 3)) r[0] = r[1] = r[2] = r[3] = 0;
}
static uint64_t xgetbv(void)
{
    uint32_t low, high;
    __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return (uint64_t)high << 32 | low;
}
#endif

static int all_bits(uint64_t value, uint64_t bits) { return (value & bits) == bits; }

int mha_cpu_has(mha_isa isa)
{
    enum { EAX, EBX, ECX, EDX };
    const unsigned fma = 1u << 12, osxsave = 1u << 27, avx = 1u << 28, f16c = 1u << 29;       /* leaf 1, ECX */
    const unsigned avx2 = 1u << 5, f = 1u << 16, dq = 1u << 17, bw = 1u << 30, vl = 1u << 31; /* leaf 7, EBX */
    const unsigned bf16 = 1u << 5;        /* leaf 7, subleaf 1, EAX */
    const uint64_t ymm = 0x6, zmm = 0xe6; /* XCR0: the registers that the operating system saves */
    unsigned leaf1[4], leaf7[4], leaf7_1[4];
    if (isa == MHA_ISA_SCALAR) return 1;
    cpuid(1, 0, leaf1);
    if (!all_bits(leaf1[ECX], osxsave | avx | fma | f16c) || !all_bits(xgetbv(), ymm)) return 0;
    cpuid(7, 0, leaf7);
    if (!all_bits(leaf7[EBX], avx2)) return 0;
    if (isa == MHA_ISA_AVX2) return 1;
    if (!all_bits(xgetbv(), zmm) || !all_bits(leaf7[EBX], f | dq | bw | vl)) return 0;
    if (isa == MHA_ISA_AVX512) return 1;
    if (leaf7[EAX] < 1) return 0; /* the number of further subleaves */
    cpuid(7, 1, leaf7_1);
    return isa == MHA_ISA_AVX512_BF16 && all_bits(leaf7_1[EAX], bf16);
}

uint64_t mha_fp_enter(void)
{
    uint64_t saved = _mm_getcsr();
    _mm_setcsr(0x1f80); /* all exceptions masked, round to nearest, denormals kept */
    return saved;
}
void mha_fp_leave(uint64_t saved) { _mm_setcsr((unsigned)saved); }

#elif defined(__aarch64__) && defined(__GNUC__)

int mha_cpu_has(mha_isa isa) { return isa == MHA_ISA_SCALAR || isa == MHA_ISA_NEON; }

uint64_t mha_fp_enter(void)
{
    uint64_t control, status;
    __asm__ volatile("mrs %0, fpcr" : "=r"(control));
    __asm__ volatile("mrs %0, fpsr" : "=r"(status));
    __asm__ volatile("msr fpcr, %0" : : "r"((uint64_t)0));
    return control << 32 | (status & 0xffffffff);
}
void mha_fp_leave(uint64_t saved)
{
    __asm__ volatile("msr fpcr, %0" : : "r"(saved >> 32));
    __asm__ volatile("msr fpsr, %0" : : "r"(saved & 0xffffffff));
}

#else

int mha_cpu_has(mha_isa isa) { return isa == MHA_ISA_SCALAR; }
uint64_t mha_fp_enter(void) { return 0; }
void mha_fp_leave(uint64_t saved) { (void)saved; }

#endif
