/* Collectives between the processes of one host, over a memory segment that all of them have mapped.
 *
 * Every rank owns one line (a cache line with its counter and what it is calling) and two slots for data. A collective
 * is a sequence of rounds, one per slot-sized chunk. In round n a rank copies its chunk into its slot n % 2, states in
 * its line what it is calling, and releases n as its counter. It then waits until every counter has reached n, checks
 * that all called the same, and reads the slots it needs.
 *
 * Why two slots are enough: a rank writes slot n % 2 again in round n + 2, which it enters only after every counter has
 * reached n + 1; and a rank releases n + 1 only after it has finished reading round n. The same holds for the two
 * statements in a line.
 *
 * The segment is made, mapped and removed by shared_memory.py, which also decides when to give up: a call that has
 * waited for a while returns AGAIN and is called again with the same struct.
 */
#include "half.h"

#include <sched.h>
#include <stdatomic.h>
#include <time.h>

enum { OK = 0, AGAIN = 1, MISMATCH = 2, ABORTED = 3, LEFT = 4 };
enum { ALL_REDUCE = 1, ALL_GATHER = 2, GATHER = 3, BROADCAST = 4, BARRIER = 5 };
enum { FLOAT32 = 1, BFLOAT16 = 2, FLOAT16 = 3 };

/* Keep these three in step with shared_memory.py. Lines are 128 bytes apart: prefetchers fetch pairs of 64. */
#define LINE_STRIDE 128
#define FIRST_LINE 128
#define SLOT_ALIGN 4096

typedef struct {
    uint64_t what; /* operation | dtype << 8 | root << 16 */
    uint64_t bytes;
    uint64_t epoch;
} statement;

typedef struct {
    _Atomic uint64_t round;
    statement called[2];
    _Atomic uint64_t left;
} line;

typedef struct {
    uint64_t layout; /* written before the segment gets its name, and never again */
    _Atomic uint64_t aborted;
} header;

typedef struct {
    char *base;
    uint64_t slot_bytes;
    uint64_t round; /* of the last chunk finished */
    uint64_t spins; /* pauses before the first yield */
    const char *in;
    char *out;
    statement called;
    uint64_t done; /* bytes finished */
    uint32_t posted; /* whether the current chunk is in its slot */
    uint32_t rank;
    uint32_t size;
} call;

static line *line_of(const call *c, uint32_t rank) {
    return (line *)(c->base + FIRST_LINE + (uint64_t)rank * LINE_STRIDE);
}

static char *slot_of(const call *c, uint32_t rank, uint64_t round) {
    uint64_t first = FIRST_LINE + (uint64_t)c->size * LINE_STRIDE;
    first = (first + SLOT_ALIGN - 1) / SLOT_ALIGN * SLOT_ALIGN;
    return c->base + first + ((uint64_t)rank * 2 + (round & 1)) * c->slot_bytes;
}

static inline void pause_cpu(void) {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

/* One more than the rank that gave the group up first, or 0. */
uint64_t lockstep_aborted(const call *c) {
    return atomic_load_explicit(&((header *)c->base)->aborted, memory_order_acquire);
}

/* Waits for one rank to reach a round. `waited` goes on from rank to rank: first pauses, then yields, then sleeps that
 * grow to 0.5 ms; after about 0.1 s of those the caller gets AGAIN, so that it can look at the clock and at signals. */
static int wait_for(const call *c, uint32_t rank, uint64_t round, uint64_t *waited) {
    const uint64_t yields = 2000, sleeps = 250;
    line *theirs = line_of(c, rank);
    while (atomic_load_explicit(&theirs->round, memory_order_acquire) < round) {
        int status = lockstep_aborted(c) ? ABORTED : atomic_load_explicit(&theirs->left, memory_order_acquire) ? LEFT : OK;
        /* Looked at again, because they may have come, and only then have given up or left. */
        if (status != OK && atomic_load_explicit(&theirs->round, memory_order_acquire) < round) return status;
        uint64_t turn = (*waited)++;
        if (turn < c->spins) {
            pause_cpu();
        } else if (turn < c->spins + yields) {
            sched_yield();
        } else if (turn < c->spins + yields + sleeps) {
            long slept = (long)(turn - c->spins - yields);
            struct timespec pause = {0, slept < 24 ? 20000 * (slept + 1) : 500000};
            nanosleep(&pause, NULL);
        } else {
            return AGAIN;
        }
    }
    return OK;
}

#define TILE 512

/* out = the sum of every rank's chunk, in rank order, in fp32, rounded once. */
#define DEFINE_SUM(name, type, widen, narrow)                                                     \
    static void name(const call *c, uint64_t round, char *out, uint64_t bytes) {                  \
        float sum[TILE];                                                                          \
        uint64_t count = bytes / sizeof(type);                                                    \
        for (uint64_t begin = 0; begin < count; begin += TILE) {                                  \
            uint64_t n = count - begin < TILE ? count - begin : TILE;                             \
            const type *part = (const type *)slot_of(c, 0, round) + begin;                        \
            for (uint64_t i = 0; i < n; i++) sum[i] = widen(part[i]);                             \
            for (uint32_t rank = 1; rank < c->size; rank++) {                                     \
                part = (const type *)slot_of(c, rank, round) + begin;                             \
                for (uint64_t i = 0; i < n; i++) sum[i] += widen(part[i]);                        \
            }                                                                                     \
            type *to = (type *)out + begin;                                                       \
            for (uint64_t i = 0; i < n; i++) to[i] = narrow(sum[i]);                              \
        }                                                                                         \
    }

#define SAME(value) (value)
DEFINE_SUM(sum_float32, float, SAME, SAME)
DEFINE_SUM(sum_bfloat16, uint16_t, bf16_to_float, float_to_bf16)
DEFINE_SUM(sum_float16, uint16_t, fp16_to_float, float_to_fp16)

static void deliver(const call *c, uint64_t round, uint64_t bytes) {
    uint32_t operation = c->called.what & 0xff, dtype = (c->called.what >> 8) & 0xff;
    uint32_t root = (uint32_t)(c->called.what >> 16);
    if (!c->out) return;
    if (operation == ALL_REDUCE) {
        char *out = c->out + c->done;
        if (dtype == FLOAT32) sum_float32(c, round, out, bytes);
        if (dtype == BFLOAT16) sum_bfloat16(c, round, out, bytes);
        if (dtype == FLOAT16) sum_float16(c, round, out, bytes);
    } else if (operation == ALL_GATHER || operation == GATHER) {
        for (uint32_t rank = 0; rank < c->size; rank++)
            memcpy(c->out + rank * c->called.bytes + c->done, slot_of(c, rank, round), bytes);
    } else if (operation == BROADCAST) {
        memcpy(c->out + c->done, slot_of(c, root, round), bytes);
    }
}

/* Carries out the rest of a call. OK: done. AGAIN: call again. Anything else: the group is to be given up. */
int lockstep_collective(call *c) {
    do {
        uint64_t round = c->round + 1, left = c->called.bytes - c->done, waited = 0;
        uint64_t bytes = left < c->slot_bytes ? left : c->slot_bytes;
        if (!c->posted) {
            if (lockstep_aborted(c)) return ABORTED;
            line *mine = line_of(c, c->rank);
            if (bytes) memcpy(slot_of(c, c->rank, round), c->in + c->done, bytes);
            mine->called[round & 1] = c->called;
            atomic_store_explicit(&mine->round, round, memory_order_release);
            c->posted = 1;
        }
        for (uint32_t rank = 0; rank < c->size; rank++) {
            int status = wait_for(c, rank, round, &waited);
            if (status != OK) return status;
        }
        for (uint32_t rank = 0; rank < c->size; rank++)
            if (memcmp(&line_of(c, rank)->called[round & 1], &c->called, sizeof(statement))) return MISMATCH;
        deliver(c, round, bytes);
        c->round = round;
        c->posted = 0;
        c->done += bytes;
    } while (c->done < c->called.bytes);
    return OK;
}

/* What the ranks see of each other, for messages and for the end. */
uint64_t lockstep_round(const call *c, uint32_t rank) {
    return atomic_load_explicit(&line_of(c, rank)->round, memory_order_acquire);
}

int lockstep_has_left(const call *c, uint32_t rank) {
    return atomic_load_explicit(&line_of(c, rank)->left, memory_order_acquire) != 0;
}

void lockstep_statement(const call *c, uint32_t rank, statement *into) {
    *into = line_of(c, rank)->called[(c->round + 1) & 1];
}

void lockstep_leave(const call *c) {
    atomic_store_explicit(&line_of(c, c->rank)->left, 1, memory_order_release);
}

/* Tells every rank that waits, now or later, that `rank` has given the group up. The first to say so is kept. */
void lockstep_abort(const call *c) {
    uint64_t nobody = 0;
    atomic_compare_exchange_strong(&((header *)c->base)->aborted, &nobody, (uint64_t)c->rank + 1);
}
