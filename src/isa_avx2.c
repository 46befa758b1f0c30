/* Level avx2: the only file compiled with its instruction-set flags; exports its table and nothing more. */
#include <math.h>
#include <stdint.h>

#include "vec_avx2.h"

#include "isa_tmpl.h"

mha_kernel_tables mha_kernels_avx2 = {&kernels_f32, &kernels_f64, NULL};
