/* What is done to the scores of a tile after the product: cap, slopes, biases, and what hides keys. */

/* Keys are counted from the block's border, see block_base; numbers of lanes from the panel's first. */
typedef struct FN(tile_mask) {
    const uint16_t
        *bits; /* [group of 16 lanes][bits_row] from the tile's first key on; NULL where there is no bool mask */
    int64_t bits_row;
    int is_bias;         /* the float mask's biases lie where the scores will */
    int lane;            /* the tile's first */
    int64_t key;         /* the tile's first */
    const REAL *visible; /* [panel]: keys at or beyond this one are hidden; NULL where none of the tile's is */
    const REAL *before;  /* [panel]: keys at or below this one are hidden; NULL likewise, visible is there otherwise */
    /* for apply_rules alone */
    REAL softcap;
    const REAL *slope, *position; /* [panel]; NULL where there are no slopes */
} FN(tile_mask);

enum { FN(plain), FN(by_length), FN(by_window), FN(by_bits), FN(by_bias) };

MHA_INLINE VEC FN(hide)(const int kind, VEC score, int k, int v, const FN(tile_mask) *mask, const REAL *bias)
{
    if (kind == FN(by_bits)) {
        int lane = mask->lane + v * V(lanes);
        score = V(keep_bits)(score, (uint32_t)mask->bits[lane / 16 * mask->bits_row + k] >> lane % 16);
    }
    if (kind == FN(by_bias)) score = V(add_bias)(score, V(load)(bias));
    if (kind == FN(by_window))
        score = V(below)(score, V(load)(mask->before + mask->lane + v * V(lanes)), V(set1)((REAL)(mask->key + k)));
    if (kind != FN(plain) &&mask->visible)
        score = V(below)(score, V(set1)((REAL)(mask->key + k)), V(load)(mask->visible + mask->lane + v * V(lanes)));
    return score;
}

MHA_INLINE VEC FN(cap)(VEC score, REAL softcap)
{
    return V(mul)(V(set1)(softcap), FN(tanh_lanes)(V(mul)(score, V(set1)(1 / softcap))));
}

/* score - slope * |steps|. Neither the product nor the sum of finite numbers becomes -inf, which would hide the key. */
MHA_INLINE VEC FN(add_slope)(VEC score, VEC slope, VEC steps)
{
    VEC highest = V(set1)(REAL_HIGHEST), lowest = V(set1)(-REAL_HIGHEST);
    VEC distance = V(max)(steps, V(sub)(V(zero)(), steps)), bias = V(sub)(V(zero)(), V(mul)(slope, distance));
    return V(add_bias)(score, V(max)(lowest, V(choose)(highest, bias, highest, bias)));
}

/* What the kinds of hide do not: the scores of a tile from raw to where they belong, both of row length panel; max as
 * in store_scores. */
MHA_NOINLINE void FN(apply_rules)(int keys, int vecs, const FN(tile_mask) *mask, const REAL *RESTRICT raw,
                                  REAL *RESTRICT scores, REAL *RESTRICT max)
{
    for (int v = 0; v < vecs; v++) {
        VEC highest = V(load)(max + v * V(lanes));
        for (int k = 0; k < keys; k++) {
            VEC score = V(load)(raw + k * V(panel) + v * V(lanes)), key = V(set1)((REAL)(mask->key + k));
            REAL *dst = scores + k * V(panel) + v * V(lanes);
            if (mask->softcap != 0) score = FN(cap)(score, mask->softcap);
            if (mask->slope)
                score = FN(add_slope)(score, V(load)(mask->slope + mask->lane + v * V(lanes)),
                                      V(sub)(V(load)(mask->position + mask->lane + v * V(lanes)), key));
            if (mask->bits)
                score = FN(hide)(FN(by_bits), score, k, v, mask, dst);
            else if (mask->is_bias)
                score = FN(hide)(FN(by_bias), score, k, v, mask, dst);
            else
                score = FN(hide)(FN(by_length), score, k, v, mask, dst);
            if (mask->before) score = V(below)(score, V(load)(mask->before + mask->lane + v * V(lanes)), key);
            V(store)(dst, score);
            highest = V(max)(highest, score);
        }
        V(store)(max + v * V(lanes), highest);
    }
}
