/* All kernels of one level for one compute dtype, and the entry of the level's table. */
#include "exp_tmpl.h"
#include "tanh_tmpl.h"
#include "scratch_tmpl.h"
#include "rules_tmpl.h"
#include "storage_tmpl.h"
#include "gemm_tmpl.h"
#include "pairs_tmpl.h"
#include "pack_tmpl.h"
#include "state_tmpl.h"
#include "mask_tmpl.h"
#include "panel_tmpl.h"
#include "few_tmpl.h"
#include "affine_tmpl.h"

static const mha_kernels FN(kernels) = {
    {V(lanes), V(panel), V(key_tile), V(row_tile), FN(affine_tile), V(align_values)},
    FN(scratch_bytes),
    FN(open_scratch),
    FN(state_bytes),
    FN(attend_panels),
    FN(attend_few),
    FN(merge),
    FN(panel_weights),
    FN(few_weights),
    FN(affine),
    FN(pack_weight),
    FN(exp2),
    FN(tanh),
};
