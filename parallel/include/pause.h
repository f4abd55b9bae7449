/* The pause of a spinning thread: lets the other hardware thread of a core run. */
#ifndef LOCKSTEP_PAUSE_H
#define LOCKSTEP_PAUSE_H

static inline void pause_cpu(void) {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

#endif
