/* Level scalar: the architecture's baseline; exports its table and nothing more. */
#include <math.h>
#include <stdint.h>

#include "vec_scalar.h"

#include "isa_tmpl.h"

mha_kernel_tables mha_kernels_scalar = {&kernels_f32, &kernels_f64, NULL};
