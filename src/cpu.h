/* What the running CPU and operating system offer, and the floating-point state of a thread. Internal. */
#ifndef MHA_CPU_H
#define MHA_CPU_H

#include "mha.h"

int mha_cpu_has(mha_isa isa);

/* Default rounding and denormals for the calling thread; leave() puts back what enter() gave, the sticky exception
 * flags included, so that a call raises no flag that NumPy would report. */
uint64_t mha_fp_enter(void);
void mha_fp_leave(uint64_t saved);

#endif
