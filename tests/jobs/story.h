/* The common part of programs with stories: they print each action and its result. */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

/* Prints one line: the action, and its result. */
static void say(const char *what, long result)
{
    int error = errno;
    char line[256];
    int length = result < 0 ? snprintf(line, sizeof line, "%s: %s\n", what, strerrorname_np(error))
                            : snprintf(line, sizeof line, "%s: %ld\n", what, result);
    if (write(1, line, length) != length)
        _exit(9);
}

/* Text that names its file, its writer and its time. */
static long put(int file, const char *text)
{
    return write(file, text, strlen(text));
}

static int make(const char *name)
{
    return open(name, O_RDWR | O_CREAT | O_TRUNC, 0644);
}

/* Prints a file's content after a new open. */
static void show(const char *name)
{
    char text[4096], what[4200];
    int file = open(name, O_RDONLY);
    long length = file < 0 ? -1 : read(file, text, sizeof text - 1);
    if (length < 0) {
        say(name, -1);
        return;
    }
    text[length] = 0;
    snprintf(what, sizeof what, "%s reads '%.150s', bytes", name, text);
    say(what, length);
    close(file);
}

static long size_of(const char *name)
{
    struct stat found;
    return stat(name, &found) ? -1 : (long)found.st_size;
}

/* A story, by its name. */
struct story {
    const char *name;
    void (*tell)(void);
};

/* Runs one story; returns the program's exit status. */
static int tell(const struct story *stories, unsigned count, const char *name)
{
    for (unsigned at = 0; at < count; at++) {
        if (strcmp(stories[at].name, name) == 0) {
            stories[at].tell();
            return 0;
        }
    }
    return 2;
}
