/* A few threads that help one caller with a loop.
 *
 * The caller publishes a loop and works on it itself; helpers take parts of it when they get to run. The caller waits
 * only for parts that a helper has begun, never for a helper that has not come: on a machine with more runnable threads
 * than cores, where a barrier of all threads costs whole time slices, the caller simply does all the work.
 *
 * Everything is one word: the number of the loop in the high half, the parts nobody has taken in the low half. Taking a
 * part is a compare-and-swap from n to n - 1, which fails if another loop has begun. The loop's other fields are
 * written before the word and read only by who holds a part of it, and the caller returns (and so may begin another
 * loop) only after every part was finished.
 *
 * A helper without work looks for some for SPIN_NANOSECONDS, long enough for the time between two layers, and then
 * sleeps: while no request runs, nothing spins.
 */
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <time.h>

#define SPIN_NANOSECONDS 200000
#define STACK_BYTES (1 << 20)
#define MOST_HELPERS 255

typedef void part_function(void *work, long part);

static struct {
    _Alignas(128) _Atomic uint64_t open;
    part_function *function;
    void *work;
    uint32_t parts;
    _Alignas(128) _Atomic uint32_t finished;
    _Alignas(128) _Atomic int wanted; /* helpers that may take parts */
    _Atomic int asleep;
    int running; /* helpers that exist */
    atomic_flag busy;
    pthread_mutex_t mutex;
    pthread_cond_t work_came;
} pool = {.busy = ATOMIC_FLAG_INIT, .mutex = PTHREAD_MUTEX_INITIALIZER, .work_came = PTHREAD_COND_INITIALIZER};

static pthread_once_t fork_is_handled = PTHREAD_ONCE_INIT;

static inline void pause_cpu(void) {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

static uint64_t nanoseconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

/* Takes and runs parts until none is left; whether there was one. */
static int run_parts(void) {
    uint64_t open = atomic_load_explicit(&pool.open, memory_order_acquire);
    int any = 0;
    while ((uint32_t)open) {
        if (!atomic_compare_exchange_weak_explicit(&pool.open, &open, open - 1, memory_order_acquire,
                                                   memory_order_acquire))
            continue;
        any = 1;
        pool.function(pool.work, (long)(pool.parts - (uint32_t)open));
        atomic_fetch_add_explicit(&pool.finished, 1, memory_order_release);
        open = atomic_load_explicit(&pool.open, memory_order_acquire);
    }
    return any;
}

static int has_work(int helper) {
    return helper < atomic_load(&pool.wanted) && (uint32_t)atomic_load(&pool.open) != 0;
}

static void sleep_until_work(int helper) {
    pthread_mutex_lock(&pool.mutex);
    /* Said before looking again: a caller that does not see this sleeper has published what the sleeper will see. */
    atomic_fetch_add(&pool.asleep, 1);
    while (!has_work(helper)) pthread_cond_wait(&pool.work_came, &pool.mutex);
    atomic_fetch_sub(&pool.asleep, 1);
    pthread_mutex_unlock(&pool.mutex);
}

static void *help(void *number) {
    int helper = (int)(intptr_t)number;
    for (;;) {
        uint64_t begun = nanoseconds();
        while (!has_work(helper) && nanoseconds() - begun < SPIN_NANOSECONDS) {
            for (int i = 0; i < 32 && !has_work(helper); i++) pause_cpu();
            if (!has_work(helper)) sched_yield();
        }
        if (!has_work(helper) || !run_parts()) sleep_until_work(helper);
    }
    return NULL;
}

/* A child of fork has one thread. */
static void forget_helpers(void) {
    pool.running = 0;
    atomic_store(&pool.wanted, 0);
    atomic_store(&pool.asleep, 0);
    pthread_mutex_init(&pool.mutex, NULL);
    pthread_cond_init(&pool.work_came, NULL);
}

static void handle_fork(void) { pthread_atfork(NULL, NULL, forget_helpers); }

/* Lets `threads` threads work on a loop, the caller included. Gives how many will: fewer if the system refuses. */
int lockstep_pool_threads(int threads) {
    int helpers = threads < 1 ? 0 : threads - 1 < MOST_HELPERS ? threads - 1 : MOST_HELPERS;
    pthread_once(&fork_is_handled, handle_fork);
    pthread_attr_t detached;
    pthread_attr_init(&detached);
    pthread_attr_setdetachstate(&detached, PTHREAD_CREATE_DETACHED);
    pthread_attr_setstacksize(&detached, STACK_BYTES);
    while (pool.running < helpers) {
        pthread_t thread;
        if (pthread_create(&thread, &detached, help, (void *)(intptr_t)pool.running)) break;
        pool.running++;
    }
    pthread_attr_destroy(&detached);
    atomic_store(&pool.wanted, helpers < pool.running ? helpers : pool.running);
    return 1 + atomic_load(&pool.wanted);
}

/* function(work, part) for every part from 0 to parts - 1, in no order. A second caller at a time works alone. */
void lockstep_parallel(part_function *function, void *work, long parts) {
    if (parts < 2 || !atomic_load_explicit(&pool.wanted, memory_order_relaxed) ||
        atomic_flag_test_and_set_explicit(&pool.busy, memory_order_acquire)) {
        for (long part = 0; part < parts; part++) function(work, part);
        return;
    }
    pool.function = function;
    pool.work = work;
    pool.parts = (uint32_t)parts;
    atomic_store_explicit(&pool.finished, 0, memory_order_relaxed);
    uint64_t loop = (atomic_load_explicit(&pool.open, memory_order_relaxed) >> 32) + 1;
    atomic_store(&pool.open, loop << 32 | (uint32_t)parts);
    if (atomic_load(&pool.asleep)) {
        pthread_mutex_lock(&pool.mutex);
        pthread_cond_broadcast(&pool.work_came);
        pthread_mutex_unlock(&pool.mutex);
    }
    run_parts();
    for (int turn = 0; atomic_load_explicit(&pool.finished, memory_order_acquire) != (uint32_t)parts; turn++) {
        if (turn < 2000) {
            pause_cpu();
        } else {
            sched_yield();
        }
    }
    atomic_flag_clear_explicit(&pool.busy, memory_order_release);
}
