/* Collectives between the processes of one host over a mapped shared-memory segment.
 *
 * Every rank owns its flags (a round counter and the descriptors of its collectives) and two slots for data. A collective
 * is a sequence of rounds, one per slot-sized chunk. In round n a rank copies its chunk to its slot n % 2, stores the
 * collective's descriptor in its flags, and releases n as its round. It then waits until the round of every rank has
 * reached n, compares the descriptors, and reads the slots it needs.
 *
 * Two slots are enough: a rank overwrites slot n % 2 in round n + 2, which it enters only after every round has reached
 * n + 1; and a rank releases n + 1 only after it has finished reading round n. The same holds for the two descriptors.
 *
 * shared_memory.py creates, maps and removes the segment and keeps the deadline: a call that has waited for about 0.1 s
 * returns AGAIN and is called again with the same struct.
 */
#include "half.h"
#include "pause.h"
#include "shared_struct.h"

#include <sched.h>
#include <stdatomic.h>
#include <time.h>

enum { OK = 0, AGAIN = 1, MISMATCH = 2, ABORTED = 3, LEFT = 4 };
enum { ALL_REDUCE = 1, ALL_GATHER = 2, GATHER = 3, BROADCAST = 4, BARRIER = 5 };
enum { FLOAT32 = 1, BFLOAT16 = 2, FLOAT16 = 3 };

/* As in segment.py. Flags are 128 bytes apart: prefetchers fetch pairs of 64-byte cache lines. */
#define FLAGS_STRIDE 128
#define FIRST_FLAGS 128
#define SLOT_ALIGN 4096

typedef struct {
    uint64_t what; /* operation | dtype << 8 | root << 16 */
    uint64_t bytes;
    uint64_t epoch;
} descriptor;

EXPORT_SIZE(descriptor);
_Static_assert(sizeof(descriptor) == 3 * 8, "as in shared_memory.py");

typedef struct {
    _Atomic uint64_t round;
    descriptor descriptors[2];
    _Atomic uint64_t left;
} rank_flags;

_Static_assert(sizeof(rank_flags) <= FLAGS_STRIDE, "flags of two ranks would overlap");

typedef struct {
    uint64_t layout; /* written once, before the segment gets its name */
    _Atomic uint64_t aborted;
} header;

_Static_assert(sizeof(header) <= FIRST_FLAGS, "the header would overlap the flags of rank 0");

typedef struct {
    char *base;
    uint64_t slot_bytes;
    uint64_t round; /* of the last finished chunk */
    uint64_t spins; /* pauses before the first yield */
    const char *in;
    char *out;
    descriptor current;
    uint64_t done;   /* in bytes */
    uint32_t posted; /* whether the current chunk is in its slot */
    uint32_t rank;
    uint32_t size;
} collective_call;

EXPORT_SIZE(collective_call);
_Static_assert(sizeof(collective_call) == 10 * 8 + 4 * 4, "as in shared_memory.py");

static rank_flags *flags_of(const collective_call *c, uint32_t rank) {
    return (rank_flags *)(c->base + FIRST_FLAGS + (uint64_t)rank * FLAGS_STRIDE);
}

static char *slot_of(const collective_call *c, uint32_t rank, uint64_t round) {
    uint64_t first = FIRST_FLAGS + (uint64_t)c->size * FLAGS_STRIDE;
    first = (first + SLOT_ALIGN - 1) / SLOT_ALIGN * SLOT_ALIGN;
    return c->base + first + ((uint64_t)rank * 2 + (round & 1)) * c->slot_bytes;
}

/* One more than the rank that aborted the group first, or 0. */
uint64_t lockstep_aborted(const collective_call *c) {
    return atomic_load_explicit(&((header *)c->base)->aborted, memory_order_acquire);
}

/* Waits for one rank to reach a round. `waited` counts over all ranks: first pauses, then yields, then sleeps that grow to
 * 0.5 ms; after about 0.1 s of sleeps it returns AGAIN, so that the caller can check its deadline and signals. */
static int wait_for(const collective_call *c, uint32_t rank, uint64_t round, uint64_t *waited) {
    const uint64_t yields = 2000, sleeps = 250;
    rank_flags *peer = flags_of(c, rank);
    while (atomic_load_explicit(&peer->round, memory_order_acquire) < round) {
        int status = lockstep_aborted(c)                                       ? ABORTED
                     : atomic_load_explicit(&peer->left, memory_order_acquire) ? LEFT
                                                                               : OK;
        /* Read again: the peer may have reached the round first and aborted or left after it. */
        if (status != OK && atomic_load_explicit(&peer->round, memory_order_acquire) < round) return status;
        uint64_t attempt = (*waited)++;
        if (attempt < c->spins) {
            pause_cpu();
        } else if (attempt < c->spins + yields) {
            sched_yield();
        } else if (attempt < c->spins + yields + sleeps) {
            long slept = (long)(attempt - c->spins - yields);
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
#define DEFINE_SUM(name, type, to_f32, from_f32)                                                                       \
    static void name(const collective_call *c, uint64_t round, char *out, uint64_t bytes) {                            \
        float sum[TILE];                                                                                               \
        uint64_t count = bytes / sizeof(type);                                                                         \
        for (uint64_t begin = 0; begin < count; begin += TILE) {                                                       \
            uint64_t n = count - begin < TILE ? count - begin : TILE;                                                  \
            const type *chunk = (const type *)slot_of(c, 0, round) + begin;                                            \
            for (uint64_t i = 0; i < n; i++) sum[i] = to_f32(chunk[i]);                                                \
            for (uint32_t rank = 1; rank < c->size; rank++) {                                                          \
                chunk = (const type *)slot_of(c, rank, round) + begin;                                                 \
                for (uint64_t i = 0; i < n; i++) sum[i] += to_f32(chunk[i]);                                           \
            }                                                                                                          \
            type *dst = (type *)out + begin;                                                                           \
            for (uint64_t i = 0; i < n; i++) dst[i] = from_f32(sum[i]);                                                \
        }                                                                                                              \
    }

#define SAME(value) (value)
DEFINE_SUM(sum_float32, float, SAME, SAME)
DEFINE_SUM(sum_bfloat16, uint16_t, bf16_to_float, float_to_bf16)
DEFINE_SUM(sum_float16, uint16_t, fp16_to_float, float_to_fp16)

static void write_result(const collective_call *c, uint64_t round, uint64_t bytes) {
    uint32_t operation = c->current.what & 0xff, dtype = (c->current.what >> 8) & 0xff;
    uint32_t root = (uint32_t)(c->current.what >> 16);
    if (!c->out) return;
    if (operation == ALL_REDUCE) {
        char *out = c->out + c->done;
        if (dtype == FLOAT32) sum_float32(c, round, out, bytes);
        if (dtype == BFLOAT16) sum_bfloat16(c, round, out, bytes);
        if (dtype == FLOAT16) sum_float16(c, round, out, bytes);
    } else if (operation == ALL_GATHER || operation == GATHER) {
        for (uint32_t rank = 0; rank < c->size; rank++)
            memcpy(c->out + rank * c->current.bytes + c->done, slot_of(c, rank, round), bytes);
    } else if (operation == BROADCAST) {
        memcpy(c->out + c->done, slot_of(c, root, round), bytes);
    }
}

/* Executes the rest of a collective. OK: finished. AGAIN: call again. Any other status is fatal for the group. */
int lockstep_collective(collective_call *c) {
    do {
        uint64_t round = c->round + 1, left = c->current.bytes - c->done, waited = 0;
        uint64_t bytes = left < c->slot_bytes ? left : c->slot_bytes;
        if (!c->posted) {
            if (lockstep_aborted(c)) return ABORTED;
            rank_flags *own = flags_of(c, c->rank);
            if (bytes) memcpy(slot_of(c, c->rank, round), c->in + c->done, bytes);
            own->descriptors[round & 1] = c->current;
            atomic_store_explicit(&own->round, round, memory_order_release);
            c->posted = 1;
        }
        for (uint32_t rank = 0; rank < c->size; rank++) {
            int status = wait_for(c, rank, round, &waited);
            if (status != OK) return status;
        }
        for (uint32_t rank = 0; rank < c->size; rank++)
            if (memcmp(&flags_of(c, rank)->descriptors[round & 1], &c->current, sizeof(descriptor))) return MISMATCH;
        write_result(c, round, bytes);
        c->round = round;
        c->posted = 0;
        c->done += bytes;
    } while (c->done < c->current.bytes);
    return OK;
}

/* State of other ranks, for error messages and for leaving. */
uint64_t lockstep_round(const collective_call *c, uint32_t rank) {
    return atomic_load_explicit(&flags_of(c, rank)->round, memory_order_acquire);
}

int lockstep_has_left(const collective_call *c, uint32_t rank) {
    return atomic_load_explicit(&flags_of(c, rank)->left, memory_order_acquire) != 0;
}

void lockstep_descriptor(const collective_call *c, uint32_t rank, descriptor *into) {
    *into = flags_of(c, rank)->descriptors[(c->round + 1) & 1];
}

void lockstep_leave(const collective_call *c) {
    atomic_store_explicit(&flags_of(c, c->rank)->left, 1, memory_order_release);
}

/* Aborts the group: every rank that waits, now or later, returns ABORTED. The first rank to abort is recorded. */
void lockstep_abort(const collective_call *c) {
    uint64_t not_aborted = 0;
    atomic_compare_exchange_strong(&((header *)c->base)->aborted, &not_aborted, (uint64_t)c->rank + 1);
}
