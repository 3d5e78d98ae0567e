/* sanitized: a program that checks its own memory accesses (the compiler's -fsanitize) uses files, with threads, a
 * child and a mapping. */
#define _GNU_SOURCE
#include <dirent.h>
#include <pthread.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/wait.h>

#include "story.h"

#define BYTES 5000
#define FILES 100

static void *work(void *which)
{
    long wrong = 0;
    for (int number = 0; number < FILES; number++) {
        char name[40];
        snprintf(name, sizeof name, "%ld-%d", (long)which, number);
        char *bytes = malloc(BYTES), *found = malloc(BYTES);
        memset(bytes, number, BYTES);
        int file = open(name, O_RDWR | O_CREAT, 0644);
        wrong += write(file, bytes, BYTES) != BYTES;
        wrong += lseek(file, 0, SEEK_SET) != 0 || read(file, found, BYTES) != BYTES;
        wrong += memcmp(bytes, found, BYTES) != 0 || size_of(name) != BYTES;
        wrong += close(file) + (number % 2 ? unlink(name) : 0);
        free(bytes);
        free(found);
    }
    return (void *)wrong;
}

int main(int count, char **arguments)
{
    if (count > 1 && strcmp(arguments[1], "beyond") == 0) {
        char *bytes = malloc(10);
        int file = open("file", O_RDWR | O_CREAT, 0644);
        /* The compiler's library finds that before the kernel does. */
        return write(file, bytes, 11) == 11;
    }
    pthread_t threads[4];
    for (long which = 0; which < 4; which++)
        pthread_create(&threads[which], NULL, work, (void *)which);
    for (int which = 0; which < 4; which++) {
        void *wrong;
        pthread_join(threads[which], &wrong);
        say("wrong of a thread's", (long)wrong);
    }
    int file = open("mapped", O_RDWR | O_CREAT, 0644);
    say("longer", ftruncate(file, 1 << 20));
    char *mapped = mmap(NULL, 1 << 20, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    strcpy(mapped + BYTES, "through the mapping");
    char text[8] = "";
    say("read", pread(file, text, 7, BYTES));
    say("as it was written", strcmp(text, "through"));
    munmap(mapped, 1 << 20);
    pid_t child = fork();
    if (child == 0) {
        put(file, "child");
        _exit(0);
    }
    waitpid(child, NULL, 0);
    say("where the child stopped", lseek(file, 0, SEEK_CUR));
    DIR *all = opendir(".");
    int names = 0;
    while (readdir(all))
        names++;
    closedir(all);
    say("names", names);
    return close(file);
}
