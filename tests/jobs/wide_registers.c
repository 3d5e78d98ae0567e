/* wide_registers: a program that calls the kernel directly, with values in wide registers meanwhile. The
 * output must be the same on any file system. */
#define _GNU_SOURCE
#include <stdlib.h>
#include <sys/syscall.h>

#include "story.h"

#ifdef __x86_64__
/* Writes with a value in the upper half of a register, in one that the library computes with and in one that it
 * doesn't; returns whether both are still there. */
static int is_kept_over_write(int file, const char *bytes, long length)
{
    static const unsigned long before[4] = {1, 2, 3, 4};
    unsigned long low[4], high[4];
    long result;
    __asm__ volatile("vmovdqu %[before], %%ymm1\n\t"
                     "vmovdqu %[before], %%ymm15\n\t"
                     "movl %[write], %%eax\n\t"
                     "syscall\n\t"
                     "vmovdqu %%ymm1, %[low]\n\t"
                     "vmovdqu %%ymm15, %[high]\n\t"
                     "vzeroupper"
                     : "=&a"(result), [low] "=m"(low), [high] "=m"(high)
                     : "D"((long)file), "S"(bytes), "d"(length), [before] "m"(before), [write] "i"(SYS_write)
                     : "rcx", "r11", "memory", "xmm1", "xmm15");
    return result == length && memcmp(low, before, sizeof low) == 0 && memcmp(high, before, sizeof high) == 0;
}
#endif

int main(void)
{
    static char bytes[4096];
    int file = make("wide"), kept = 0;
    memset(bytes, 'x', sizeof bytes);
#ifdef __x86_64__
    if (__builtin_cpu_supports("avx"))
        for (int number = 0; number < 200; number++)
            kept += is_kept_over_write(file, bytes, number % 2 ? sizeof bytes : 100);
#endif
    say("writes that left wide registers as they were", kept);
    say("the file's size", size_of("wide"));
    return 0;
}
