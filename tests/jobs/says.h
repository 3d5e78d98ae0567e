/* What the stories of unlucky programs have in common: they say what they did and what it gave. */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

/* One line: what was done, and what it gave. */
static void say(const char *what, long result)
{
    int error = errno;
    char line[256];
    int length = result < 0 ? snprintf(line, sizeof line, "%s: %s\n", what, strerrorname_np(error))
                            : snprintf(line, sizeof line, "%s: %ld\n", what, result);
    if (write(1, line, length) != length)
        _exit(9);
}

/* Text that says which file it was written to, by whom, and when. */
static long put(int file, const char *text)
{
    return write(file, text, strlen(text));
}

static int make(const char *name)
{
    return open(name, O_RDWR | O_CREAT | O_TRUNC, 0644);
}

/* What is in a file, found anew. */
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

/* Tells one of them; what the program ends with. */
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
