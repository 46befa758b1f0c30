/* The machine's limits: arithmetic peaks and read bandwidth. bench/machine.py compiles it for the
 * machine at hand and keeps it running. Each line of standard input is answered with one number:
 *
 *     fma BYTES THREADS     best GFLOP/s with vectors of BYTES (16, 32 or 64)
 *     dot BYTES THREADS     the same for products of pairs of bfloat16 numbers, added in float32; 0 without an instruction
 *     read BYTES THREADS    best GB/s over memory that no cache holds
 */
#define _DEFAULT_SOURCE
#ifdef __AVX512BF16__
#include <immintrin.h>
#endif
#include <omp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#ifdef __linux__
#include <sys/mman.h>
#endif

enum { CHAINS = 12, TRIES = 4 };
static const long STEPS = 1000000;         /* of each arithmetic try: about 4 ms */
static const size_t MEMORY = (size_t)1 << 29;

/* Independent chains x = x * a + b, more than latency times units of any CPU, few enough for 16 registers. The empty asm
 * keeps a compiler from working them out at compile time, and keeps each chain in a register. */
#ifdef __aarch64__
#define IN_REGISTER "+w"
#else
#define IN_REGISTER "+x"
#endif
#define DEFINE_ARITHMETIC(BYTES)                                                                      \
    typedef float vec##BYTES __attribute__((vector_size(BYTES)));                                     \
    static void arithmetic##BYTES(void)                                                               \
    {                                                                                                 \
        vec##BYTES x[CHAINS], a = {0}, b = {0};                                                       \
        a += 0.999f;                                                                                  \
        b += 1e-4f;                                                                                   \
        for (int i = 0; i < CHAINS; i++) x[i] = b;                                                    \
        for (long n = 0; n < STEPS; n++) {                                                            \
            _Pragma("GCC unroll 12") for (int i = 0; i < CHAINS; i++) x[i] = x[i] * a + b;            \
            __asm__ volatile("" : IN_REGISTER(a));                                                    \
        }                                                                                             \
        _Pragma("GCC unroll 12") for (int i = 0; i < CHAINS; i++) __asm__ volatile("" : IN_REGISTER(x[i])); \
    }
DEFINE_ARITHMETIC(16)
#if defined(__AVX__) || defined(__AVX512F__)
DEFINE_ARITHMETIC(32)
#endif
#ifdef __AVX512F__
DEFINE_ARITHMETIC(64)
#endif

#ifdef __AVX512BF16__
/* x = x + a0 b0 + a1 b1 in each lane. */
static void dots64(void)
{
    __m512 x[CHAINS];
    __m512bh a = (__m512bh)_mm512_set1_epi16(0x3c00), b = a;
    for (int i = 0; i < CHAINS; i++) x[i] = _mm512_setzero_ps();
    for (long n = 0; n < STEPS; n++) {
        _Pragma("GCC unroll 12") for (int i = 0; i < CHAINS; i++) x[i] = _mm512_dpbf16_ps(x[i], a, b);
        __asm__ volatile("" : IN_REGISTER(a));
    }
    _Pragma("GCC unroll 12") for (int i = 0; i < CHAINS; i++) __asm__ volatile("" : IN_REGISTER(x[i]));
}
#endif

typedef void arithmetic(void);

static arithmetic *arithmetic_of(const char *what, int bytes)
{
    if (!strcmp(what, "dot")) {
#ifdef __AVX512BF16__
        if (bytes == 64) return dots64;
#endif
        return NULL;
    }
#ifdef __AVX512F__
    if (bytes == 64) return arithmetic64;
#endif
#if defined(__AVX__) || defined(__AVX512F__)
    if (bytes == 32) return arithmetic32;
#endif
    return bytes == 16 ? arithmetic16 : NULL;
}

/* `flops`: of one operation on a vector. */
static double peak(arithmetic *loop, double flops, int threads)
{
    double best = 0;
    for (int n = 0; n < TRIES; n++) {
        double start = omp_get_wtime();
#pragma omp parallel num_threads(threads)
        loop();
        double rate = flops * CHAINS * STEPS * threads / (omp_get_wtime() - start);
        best = rate > best ? rate : best;
    }
    return best * 1e-9;
}

/* A load of every cache line. */
static double reading(const char *memory, int threads)
{
    double best = 0;
    for (int n = 0; n < TRIES; n++) {
        double start = omp_get_wtime();
#pragma omp parallel for num_threads(threads) schedule(static)
        for (size_t i = 0; i < MEMORY / 256; i++) {
            const vec16 *line = (const vec16 *)(memory + i * 256);
            for (int k = 0; k < 16; k += 4) {
                vec16 x = line[k];
                __asm__ volatile("" : IN_REGISTER(x));
            }
        }
        double rate = MEMORY / (omp_get_wtime() - start);
        best = rate > best ? rate : best;
    }
    return best * 1e-9;
}

int main(void)
{
    char line[64], what[8];
    int bytes, threads;
    char *memory = NULL;
    while (fgets(line, sizeof line, stdin)) {
        if (sscanf(line, "%7s %d %d", what, &bytes, &threads) != 3 || threads < 1) return 2;
        int is_read = !strcmp(what, "read");
        if (is_read && !memory) {
            memory = aligned_alloc((size_t)1 << 21, MEMORY);
            if (!memory) return 1;
#ifdef MADV_HUGEPAGE
            madvise(memory, MEMORY, MADV_HUGEPAGE); /* as NumPy asks for its large arrays */
#endif
            memset(memory, 1, MEMORY);
        }
        arithmetic *loop = arithmetic_of(what, bytes);
        double flops = (strcmp(what, "dot") ? 2.0 : 4.0) * bytes / sizeof(float);
        printf("%.2f\n", is_read ? reading(memory, threads) : loop ? peak(loop, flops, threads) : 0);
        fflush(stdout);
    }
    return 0;
}
