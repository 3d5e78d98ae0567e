/* A library that makes its system calls itself, as libraries of other languages do. */
#include <sys/stat.h>
#include <sys/syscall.h>

static __attribute__((noinline)) long call(long number, long first, long second, long third) {
    long result;
    __asm__ volatile("syscall" : "=a"(result) : "a"(number), "D"(first), "S"(second), "d"(third) : "rcx", "r11", "memory");
    return result;
}
/* Runs before any other function of the library can be called. */
static long begun;
static __attribute__((constructor)) void begin(void) { begun = call(SYS_getpid, 0, 0, 0) > 0; }

long lock_it(int file) { return begun ? call(SYS_flock, file, 2 | 4, 0) : -1; }
long sync_it(int file) { return call(SYS_fsync, file, 0, 0); }
long put(int file) { return call(SYS_write, file, (long)"end", 3); }
long place(int file) { return call(SYS_lseek, file, 0, 1); }
long size_of(int file) {
    struct stat found;
    return call(SYS_fstat, file, (long)&found, 0) ?: found.st_size;
}
