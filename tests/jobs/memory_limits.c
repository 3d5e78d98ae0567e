/* memory_limits STORY: processes without room for more memory, or with a low limit of their own. Each story
 * runs in a directory of its own; its output must be the same on any file system. */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/wait.h>

#include "story.h"

#define MIB (1UL << 20)
#define FILES 120
#define LENGTH 5000

static char *self;

/* Makes, writes, reads, renames and removes files, many of them open at once; returns how many calls went wrong. */
static long use(const char *of)
{
    static __thread int files[FILES];
    char name[64], other[64], text[LENGTH], found[LENGTH];
    struct stat status;
    long wrong = 0;
    memset(text, of[0], sizeof text);
    for (int number = 0; number < FILES; number++) {
        sprintf(name, "%s-%d", of, number);
        wrong += (files[number] = make(name)) < 0;
        for (int part = 0; part < 5; part++)
            wrong += write(files[number], text + part * LENGTH / 5, LENGTH / 5) != LENGTH / 5;
    }
    for (int number = 0; number < FILES; number++) {
        sprintf(name, "%s-%d", of, number);
        sprintf(other, "%s-%d-other", of, number);
        wrong += pread(files[number], found, LENGTH, 0) != LENGTH || memcmp(text, found, LENGTH) != 0;
        wrong += rename(name, other) != 0 || stat(other, &status) != 0 || status.st_size != LENGTH;
        wrong += number % 2 && unlink(other) != 0;
        wrong += close(files[number]) != 0;
        if (number % 2)
            continue;
        int again = open(other, O_RDWR);
        wrong += read(again, found, LENGTH) != LENGTH || memcmp(text, found, LENGTH) != 0 || close(again) != 0;
    }
    return wrong;
}

/* Reserves so much room, and uses none of it. */
static void *room_of(unsigned long bytes)
{
    return mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
}

/* Takes all room, except for a rest that is too small to use. */
struct taken {
    struct taken *next;
    unsigned long bytes;
};

static struct taken *take_all(void)
{
    struct taken *all = NULL;
    for (unsigned long bytes = 1 << 30; bytes >= 4096; bytes /= 2) {
        struct taken *more;
        while ((more = room_of(bytes)) != MAP_FAILED) {
            *more = (struct taken){all, bytes};
            all = more;
        }
    }
    return all;
}

static void give_back(struct taken *all)
{
    for (struct taken *next; all; all = next) {
        next = all->next;
        munmap(all, all->bytes);
    }
}

static void limit(int resource, unsigned long bytes)
{
    struct rlimit both = {bytes, bytes};
    say("a limit", setrlimit(resource, &both));
}

static void wait_for(const char *what, pid_t child)
{
    int status = -1;
    waitpid(child, &status, 0);
    say(what, status);
}

/* Runs this program in a process with so much room and with these variables, one of which loads another
 * library. */
static void run(unsigned long room, int variables)
{
    char *words[] = {self, "there", NULL}, **list = calloc(variables + 2, sizeof *list);
    list[0] = "LD_PRELOAD=libm.so.6";
    for (int number = 1; number <= variables; number++)
        asprintf(&list[number], "VARIABLE_%d=%d", number, number);
    pid_t child = fork();
    if (child == 0) {
        limit(RLIMIT_DATA, room);
        limit(RLIMIT_AS, room);
        execve(self, words, list);
        _exit(9);
    }
    wait_for("another program", child);
    for (int number = 1; number <= variables; number++)
        free(list[number]);
    free(list);
}

static void there(void)
{
    say("it went wrong", use("there"));
}

/* A server's processes get less room than the server. */
static void children(void)
{
    say("it went wrong", use("before"));
    for (int round = 0; round < 2; round++) {
        for (int variables = 0; variables <= 30000; variables = variables * 3 + 400)
            run(round ? 300 * MIB : 200 * MIB, variables);
        say("it went wrong", use("between"));
    }
}

/* If a process raises its limit, it can use the room. */
static void itself(void)
{
    int file = make("open");
    say("written", put(file, "before "));
    say("it went wrong", use("before"));
    limit(RLIMIT_AS, 2048 * MIB);
    say("it went wrong", use("with much room"));
    limit(RLIMIT_AS, 400 * MIB);
    say("written", put(file, "with less "));
    say("it went wrong", use("with less room"));
    char *memory = room_of(250 * MIB);
    say("room for much", memory == MAP_FAILED ? -1 : 0);
    munmap(memory, 250 * MIB);
    limit(RLIMIT_AS, 300 * MIB);
    memory = room_of(280 * MIB);
    say("room for almost all", memory == MAP_FAILED ? -1 : 0);
    say("written", put(file, "and none"));
    say("it went wrong", use("with none"));
    munmap(memory, 280 * MIB);
    limit(RLIMIT_AS, 60 * MIB);
    say("it went wrong", use("with little"));
    memory = room_of(40 * MIB);
    say("room for almost all of that", memory == MAP_FAILED ? -1 : 0);
    say("a limit that may not be", setrlimit(RLIMIT_AS, (struct rlimit *)1));
    show("open");
}

/* No room is left. */
static void none(int resource, unsigned long room)
{
    int file = make("open");
    say("written", put(file, "before "));
    say("it went wrong", use("before"));
    limit(resource, room);
    say("it went wrong", use("limited"));
    struct taken *all = take_all();
    for (int round = 0; round < 3; round++)
        say("it went wrong", use(round ? "with none, again" : "with none"));
    say("written", put(file, "with none "));
    pid_t child = fork();
    if (child == 0) {
        long wrong = use("child");
        wrong += put(file, "by a child ") != 11;
        _exit(wrong);
    }
    wait_for("a child", child);
    char *words[] = {self, "there", NULL}, *variables[] = {"LD_PRELOAD=libm.so.6", NULL};
    if ((child = fork()) == 0) {
        execve(self, words, variables);
        _exit(9);
    }
    wait_for("another program", child);
    if ((child = vfork()) == 0) {
        execve(self, words, variables);
        _exit(9);
    }
    wait_for("another program, by one with this one's memory", child);
    give_back(all);
    say("it went wrong", use("after"));
    say("written", put(file, "after"));
    show("open");
}

/* Another process lowers the limit below the used room. */
static void outside(void)
{
    int file = make("open");
    say("it went wrong", use("before"));
    pid_t child = fork();
    if (child == 0)
        _exit(prlimit(getppid(), RLIMIT_AS, &(struct rlimit){MIB, 4096 * MIB}, NULL));
    wait_for("a child", child);
    say("room for a page", mmap(NULL, 4096, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0) == MAP_FAILED ? -1 : 0);
    for (int round = 0; round < 20; round++)
        say("it went wrong", use("limited"));
    say("written", put(file, "with none"));
    if ((child = fork()) == 0)
        _exit(use("child"));
    wait_for("a child", child);
    limit(RLIMIT_AS, 4096 * MIB);
    say("it went wrong", use("after"));
    show("open");
}

static void address_space(void)
{
    none(RLIMIT_AS, 700 * MIB);
}

static void data(void)
{
    none(RLIMIT_DATA, 200 * MIB);
}

static volatile int is_over;

static void *go_on(void *of)
{
    long wrong = 0;
    while (!is_over)
        wrong += use(of);
    return (void *)wrong;
}

/* Threads continue while room runs out. */
static void threads(void)
{
    static char *names[] = {"one", "two", "three"};
    pthread_t all[3];
    for (int number = 0; number < 3; number++)
        pthread_create(&all[number], NULL, go_on, names[number]);
    usleep(100000);
    limit(RLIMIT_AS, 1024 * MIB);
    usleep(100000);
    struct taken *taken = take_all();
    say("it went wrong", use("main"));
    usleep(300000);
    is_over = 1;
    for (int number = 0; number < 3; number++) {
        void *wrong;
        pthread_join(all[number], &wrong);
        say("what went wrong", (long)wrong);
    }
    give_back(taken);
    say("it went wrong", use("after"));
}

/* The stack grows by itself, and can't without room. */
static __attribute__((noinline)) void go_deep(void)
{
    volatile char stack[1 << 20];
    for (unsigned long at = 0; at < sizeof stack; at += 4096)
        stack[at] = 1;
}

int main(int count, char **arguments)
{
    static const struct story stories[] = {{"there", there}, {"children", children}, {"itself", itself},  {"address-space", address_space},
                                           {"data", data},   {"outside", outside},   {"threads", threads}};
    go_deep();
    self = arguments[0];
    return tell(stories, sizeof stories / sizeof *stories, count == 2 ? arguments[1] : "");
}
