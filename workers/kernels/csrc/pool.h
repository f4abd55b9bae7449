/* The parallel loop of a kernel. The pool itself is pool.c, a library of its own, so that all kernels of a process share
 * its threads; bindings.py passes its address to the kernel's library.
 */
#ifndef LOCKSTEP_POOL_H
#define LOCKSTEP_POOL_H

typedef void task_function(void *work, long task);
typedef void parallel_for_function(task_function *function, void *work, long tasks);

static void run_serial(task_function *function, void *work, long tasks) {
    for (long task = 0; task < tasks; task++) function(work, task);
}

static parallel_for_function *parallel_for = run_serial;

/* Called once after the library is loaded. */
void lockstep_share_pool(parallel_for_function *pool) { parallel_for = pool ? pool : run_serial; }

#endif
