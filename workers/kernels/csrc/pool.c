/* A thread pool for parallel loops of one caller.
 *
 * The caller publishes a loop and executes tasks of it itself; pool threads take tasks when they are scheduled. The caller
 * waits only for tasks that a pool thread has begun, never for a thread that has not been scheduled yet: with more runnable
 * threads than cores, where a barrier of all threads costs whole time slices, the caller executes all tasks.
 *
 * The state of a loop is one word: the loop number in the high half, the number of tasks not yet taken in the low half.
 * Taking a task is a compare-and-swap from n to n - 1, which fails if another loop has begun. The other fields of a loop
 * are written before the word and read only by threads that hold a task of it; the caller returns, and so can begin
 * another loop, only after every task has finished.
 *
 * An idle thread polls for SPIN_NANOSECONDS, which covers the time between two layers, and then sleeps: without requests
 * nothing spins.
 *
 * Fork: the child has no pool threads. Its pool is empty and usable; a loop that was running in the parent is dropped.
 */
#include "pause.h"

#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <time.h>

#define SPIN_NANOSECONDS 200000
#define STACK_BYTES (1 << 20)
#define MAX_POOL_THREADS 255

typedef void task_function(void *work, long task);

static struct {
    _Alignas(128) _Atomic uint64_t open;
    task_function *function;
    void *work;
    uint32_t tasks;
    _Alignas(128) _Atomic uint32_t finished;
    _Alignas(128) _Atomic int wanted; /* threads that may take tasks */
    _Atomic int asleep;
    _Atomic int forks; /* between the first process and this one */
    int running;       /* threads that exist */
    atomic_flag busy;
    pthread_mutex_t mutex;
    pthread_cond_t published;
} pool = {.busy = ATOMIC_FLAG_INIT, .mutex = PTHREAD_MUTEX_INITIALIZER, .published = PTHREAD_COND_INITIALIZER};

static pthread_once_t fork_handler_is_registered = PTHREAD_ONCE_INIT;

static uint64_t nanoseconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

/* Takes and executes tasks until none is left. Returns whether there was one. */
static int run_tasks(void) {
    uint64_t open = atomic_load_explicit(&pool.open, memory_order_acquire);
    int any = 0;
    while ((uint32_t)open) {
        if (!atomic_compare_exchange_weak_explicit(&pool.open, &open, open - 1, memory_order_acquire,
                                                   memory_order_acquire))
            continue;
        any = 1;
        pool.function(pool.work, (long)(pool.tasks - (uint32_t)open));
        atomic_fetch_add_explicit(&pool.finished, 1, memory_order_release);
        open = atomic_load_explicit(&pool.open, memory_order_acquire);
    }
    return any;
}

static int has_work(int thread) { return thread < atomic_load(&pool.wanted) && (uint32_t)atomic_load(&pool.open) != 0; }

static void sleep_until_work(int thread) {
    pthread_mutex_lock(&pool.mutex);
    /* Counted before the check: a caller that does not see this sleeper has published a loop that the check sees. */
    atomic_fetch_add(&pool.asleep, 1);
    while (!has_work(thread)) pthread_cond_wait(&pool.published, &pool.mutex);
    atomic_fetch_sub(&pool.asleep, 1);
    pthread_mutex_unlock(&pool.mutex);
}

static void *pool_thread(void *number) {
    int thread = (int)(intptr_t)number;
    for (;;) {
        uint64_t begun = nanoseconds();
        while (!has_work(thread) && nanoseconds() - begun < SPIN_NANOSECONDS) {
            for (int i = 0; i < 32 && !has_work(thread); i++) pause_cpu();
            if (!has_work(thread)) sched_yield();
        }
        if (!has_work(thread) || !run_tasks()) sleep_until_work(thread);
    }
    return NULL;
}

/* Runs in the child of fork, which has one thread. Tasks that are still open belong to a caller in the parent. */
static void reset_in_child(void) {
    pool.running = 0;
    atomic_store(&pool.wanted, 0);
    atomic_store(&pool.asleep, 0);
    atomic_store(&pool.open, atomic_load(&pool.open) >> 32 << 32);
    atomic_fetch_add(&pool.forks, 1);
    atomic_flag_clear(&pool.busy);
    pthread_mutex_init(&pool.mutex, NULL);
    pthread_cond_init(&pool.published, NULL);
}

static void register_fork_handler(void) { pthread_atfork(NULL, NULL, reset_in_child); }

/* Sets the number of threads of a loop, including the caller. Returns it: fewer than asked if the system refuses more. */
int lockstep_pool_threads(int threads) {
    int wanted = threads < 1 ? 0 : threads - 1 < MAX_POOL_THREADS ? threads - 1 : MAX_POOL_THREADS;
    pthread_once(&fork_handler_is_registered, register_fork_handler);
    pthread_attr_t detached;
    pthread_attr_init(&detached);
    pthread_attr_setdetachstate(&detached, PTHREAD_CREATE_DETACHED);
    pthread_attr_setstacksize(&detached, STACK_BYTES);
    while (pool.running < wanted) {
        pthread_t thread;
        if (pthread_create(&thread, &detached, pool_thread, (void *)(intptr_t)pool.running)) break;
        pool.running++;
    }
    pthread_attr_destroy(&detached);
    atomic_store(&pool.wanted, wanted < pool.running ? wanted : pool.running);
    return 1 + atomic_load(&pool.wanted);
}

/* Executes function(work, task) for every task from 0 to tasks - 1, in any order. While a loop is running, a second caller
 * executes its tasks serially. In the child of a fork from within a task, the remaining tasks are not executed. */
void lockstep_parallel_for(task_function *function, void *work, long tasks) {
    if (tasks < 2 || !atomic_load_explicit(&pool.wanted, memory_order_relaxed) ||
        atomic_flag_test_and_set_explicit(&pool.busy, memory_order_acquire)) {
        for (long task = 0; task < tasks; task++) function(work, task);
        return;
    }
    const int forks = atomic_load_explicit(&pool.forks, memory_order_relaxed);
    pool.function = function;
    pool.work = work;
    pool.tasks = (uint32_t)tasks;
    atomic_store_explicit(&pool.finished, 0, memory_order_relaxed);
    uint64_t loop = (atomic_load_explicit(&pool.open, memory_order_relaxed) >> 32) + 1;
    atomic_store(&pool.open, loop << 32 | (uint32_t)tasks);
    if (atomic_load(&pool.asleep)) {
        pthread_mutex_lock(&pool.mutex);
        pthread_cond_broadcast(&pool.published);
        pthread_mutex_unlock(&pool.mutex);
    }
    run_tasks();
    for (int spins = 0; atomic_load_explicit(&pool.finished, memory_order_acquire) != (uint32_t)tasks; spins++) {
        if (atomic_load_explicit(&pool.forks, memory_order_relaxed) != forks) return; /* in the child, see above */
        if (spins < 2000) {
            pause_cpu();
        } else {
            sched_yield();
        }
    }
    atomic_flag_clear_explicit(&pool.busy, memory_order_release);
}
