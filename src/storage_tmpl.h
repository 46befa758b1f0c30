/* Vectors of the compute dtype from memory of any dtype that a kernel reads where it lies. storage: a constant once
 * inlined, the compute dtype, MHA_F16, MHA_BF16 or MHA_I8. Takes REAL_DTYPE.
 */

/* Whether the few-query kernel reads this dtype where it lies; what it does not is packed. Pairs are multiplied as they
 * are, others converted in registers; only float32 pays for that code. */
MHA_INLINE int FN(few_reads)(mha_dtype storage)
{
    if (PAIRS) return storage == MHA_BF16;
    int narrow = storage == MHA_F16 || storage == MHA_BF16 || storage == MHA_I8;
    return storage == REAL_DTYPE || (REAL_DTYPE == MHA_F32 && narrow);
}

/* Elements index.. of rows. */
MHA_INLINE VEC FN(load_as)(const mha_dtype storage, const char *rows, int64_t index)
{
    if (storage == MHA_F16) return V(load_f16)((const uint16_t *)rows + index);
    if (storage == MHA_BF16) return V(load_bf16)((const uint16_t *)rows + index);
    if (storage == MHA_I8) return V(load_i8)((const int8_t *)rows + index);
    return V(load)((const REAL *)rows + index);
}

/* n of them, zeros behind. */
MHA_INLINE VEC FN(load_as_n)(const mha_dtype storage, const char *rows, int64_t index, int64_t n)
{
    if (storage == MHA_F16) return V(load_f16_n)((const uint16_t *)rows + index, n);
    if (storage == MHA_BF16) return V(load_bf16_n)((const uint16_t *)rows + index, n);
    if (storage == MHA_I8) return V(load_i8_n)((const int8_t *)rows + index, n);
    return V(load_n)((const REAL *)rows + index, n);
}
