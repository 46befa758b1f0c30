/* What the driver of attention offers to that of a layer: plans, phases of tasks, and the one parallel region.
 * Internal. */
#ifndef MHA_DRIVER_H
#define MHA_DRIVER_H

#include "kernels.h"

/* Phases of tasks, a barrier between them. start is called once by each thread, run for each task by the thread of that
 * number. */
typedef struct mha_job {
    const void *plan;
    int threads, phases;
    void (*start)(const void *plan, int thread);
    int64_t (*tasks)(const void *plan, int phase);
    void (*run)(const void *plan, int phase, int64_t task, int thread);
} mha_job;

void mha_run(const mha_job *job);

/* One call of attention, cut into tasks. */
typedef struct mha_plan {
    const mha_params *p;
    const mha_kernels *kernels;
    mha_task shared; /* the part of a task that is the same for all */
    int64_t batches, heads, group, rows, rows_per_task, row_tasks,
        splits;               /* heads: key/value heads of all batch entries */
    int64_t tail_heads;       /* whose tasks are sorted by row group */
    int64_t weight_row_tasks; /* of a key/value head, in the phase of weights */
    int few;                  /* all entries take the few-query kernel */
    int split_tasks;          /* each split of the keys is a task */
    int prefetches_own;       /* a task prefetches its own keys, not those of the next head */
    int threads;
    int64_t tasks; /* of the first phase */
    /* the workspace: */
    int64_t *order;      /* batch entries, most work first; NULL in their own order */
    int64_t *first_task; /* packed sequences: of each entry in that order */
    char *states, *scratch;
    int64_t state_bytes, scratch_bytes, thread_bytes, order_bytes, bytes;
} mha_plan;

/* What the driver can check at once; a plan is made of checked parameters. */
mha_status mha_check(const mha_params *params);
/* The plan for this many threads; the same from the same arguments, so size and use of the workspace agree. bytes is -1
 * where it is beyond what can be addressed. */
void mha_make_plan(mha_plan *plan, const mha_params *params, int threads);
/* Lays the plan over memory, aligned to a cache line. */
void mha_place_plan(mha_plan *plan, char *memory);

/* mha_estimated_ns for keys and values of these dtypes, whose arrays may not be filled in yet. */
double mha_attention_ns(const mha_params *params, mha_dtype key, mha_dtype value);

enum { MHA_ATTENTION_PHASES = 3 };
void mha_attention_start(const void *plan, int thread);
int64_t mha_attention_tasks(const void *plan, int phase);
void mha_attention_task(const void *plan, int phase, int64_t task, int thread);

/* Sizes beyond this are refused before they overflow: a workspace has under 2^13 bytes a unit of depth and thread. */
#define MHA_MAX_DEPTH (INT64_MAX >> 16)

static inline int64_t mha_align_up(int64_t n) { return mha_round_up(n, 64); }
/* a * b for sizes, INT64_MAX where that is beyond an int64. */
static inline int64_t mha_saturating(int64_t a, int64_t b) { return b && a > INT64_MAX / b ? INT64_MAX : a * b; }

#endif
