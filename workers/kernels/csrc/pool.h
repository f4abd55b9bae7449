/* How a kernel gives parts of its work to other threads. The pool itself is pool.c, a library of its own, so that all
 * kernels of a process share its threads; a kernel's library is told where it is. */
#ifndef LOCKSTEP_POOL_H
#define LOCKSTEP_POOL_H

typedef void part_function(void *work, long part);
typedef void parallel_function(part_function *function, void *work, long parts);

static void run_alone(part_function *function, void *work, long parts) {
    for (long part = 0; part < parts; part++) function(work, part);
}

static parallel_function *parallel = run_alone;

/* Called once, when the library is loaded. */
void lockstep_share_pool(parallel_function *pool) { parallel = pool ? pool : run_alone; }

#endif
