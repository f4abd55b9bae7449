/* The size of a struct that Python packs, exported so that the loader can compare it with its own: see toolchain.py. */
#ifndef LOCKSTEP_SHARED_STRUCT_H
#define LOCKSTEP_SHARED_STRUCT_H

#define EXPORT_SIZE(type)                                                                                              \
    int lockstep_sizeof_##type(void);                                                                                  \
    int lockstep_sizeof_##type(void) { return (int)sizeof(type); }                                                     \
    _Static_assert(1, "")

#endif
