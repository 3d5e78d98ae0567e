/* Calls with buffers that are mapped in part, and with pointers that no process can have. The output must be the same
 * on any file system. */
#define _GNU_SOURCE
#include <sys/mman.h>
#include <sys/uio.h>

#include "story.h"

#define PAGE 4096L

int main(void)
{
    char *memory = mmap(NULL, 4 * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0), *gap = memory + 2 * PAGE;
    static char all[16 * PAGE];
    memset(memory, 'm', 4 * PAGE);
    memset(all, 'a', sizeof all);
    munmap(gap, PAGE);
    mprotect(gap + PAGE, PAGE, PROT_READ);
    int file = make("file");
    say("half of it is written", write(file, gap - 2000, 4000));
    say("the file stands behind that", lseek(file, 0, SEEK_CUR));
    say("two pages of many", pwrite(file, memory, 1 << 20, 0));
    say("its length", size_of("file"));
    say("none", pwrite(file, gap, 10, 0));
    say("all", pwrite(file, all, sizeof all, 0));
    lseek(file, 100, SEEK_SET);
    say("half of it is read", read(file, gap - 2000, 4000));
    say("the file stands behind that", lseek(file, 0, SEEK_CUR));
    say("what was read", memcmp(gap - 2000, all, 2000));
    say("none", pread(file, gap, 10, 0));
    say("none where nothing may be written", pread(file, gap + PAGE, 10, 0));
    say("up to the end of the file", pread(file, gap - 50, 4000, sizeof all - 50));
    say("less than up to there", pread(file, gap - 50, 4000, sizeof all - 60));
    struct iovec parts[] = {{all, 100}, {gap - 50, 100}, {all, 100}}, bad[] = {{gap, 100}, {all, 100}}, second[] = {{all, 100}, {gap, 100}};
    say("parts are written", pwritev(file, parts, 3, 0));
    say("parts are read", preadv(file, parts, 3, 0));
    say("the first is not there, written", pwritev(file, bad, 2, 0));
    say("the first is not there, read", preadv(file, bad, 2, 0));
    say("the second is not there, written", pwritev(file, second, 2, 0));
    say("the second is not there, read", preadv(file, second, 2, 0));
    say("more than there can be", pread(file, all, -1UL, 0));
    say("nowhere, at the end of the file", pread(file, (void *)-1L, 10, 1L << 40));
    int reader = open("file", O_RDONLY);
    say("nowhere, by who may not write", write(reader, (void *)-1L, 1));
    say("nowhere, before the beginning", pread(reader, (void *)-1L, 1, -1));
    struct stat found;
    for (int round = 0; round < 3; round++)
        say("a name that is there", stat("file", &found));
    for (int bit = 47; bit < 64; bit++)
        say("the same name where nothing can be", stat((char *)((unsigned long)"file" | 1UL << bit), &found));
    say("an answer to where nothing can be", fstat(reader, (void *)((unsigned long)&found | 1UL << 48)));
    mkdir("above", 0755);
    mkdir("above/below", 0755);
    close(make("above/below/file"));
    say("a file onto what is above it", rename("above/below/file", "above"));
    say("a directory onto what is in it", rename("above", "above/below/file"));
    say("a directory into itself", rename("above", "above/below/new"));
    int end = open("file", O_WRONLY | O_APPEND);
    say("half of it at the end", write(end, gap - 2000, 4000));
    say("its length", size_of("file"));
}
