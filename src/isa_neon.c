/* Level neon: the architecture's baseline; exports its table and nothing more. */
#include <math.h>
#include <stdint.h>

#include "vec_neon.h"

#include "isa_tmpl.h"

const mha_kernels *const mha_kernels_neon[2] = {&kernels_f32, &kernels_f64};
