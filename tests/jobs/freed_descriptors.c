/* freed_descriptors STORY: which numbers descriptors get after others were closed, and that closed numbers lead
 * nowhere. Each story runs in a directory of its own; its output must be the same on any file system. */
#define _GNU_SOURCE
#include <dirent.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <spawn.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdlib.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/file.h>
#include <sys/inotify.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/select.h>
#include <sys/sendfile.h>
#include <sys/socket.h>
#include <sys/statfs.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <sys/xattr.h>
#include <time.h>

#include "story.h"

extern char **environ;

static char *self;
static char home[4096];

/* A number whose file was just closed. */
static int just_closed(void)
{
    int file = make("closed");
    if (file < 0 || put(file, "closed") != 6 || close(file) != 0)
        say("making and closing a file", -1);
    return file;
}

static long open_beside(void)
{
    /* open_how: flags, mode, resolve. */
    unsigned long flags[3] = {O_RDONLY};
    return syscall(SYS_openat2, AT_FDCWD, "second", flags, sizeof flags);
}

/* Every way to get a descriptor. */
static long make_one(int way, int second)
{
    int two[2] = {-1, -1};
    switch (way) {
    case 0: return make("third");
    case 1: return open("/dev/null", O_RDONLY);
    case 2: return socket(AF_UNIX, SOCK_STREAM, 0);
    case 3: return dup(second);
    case 4: return dup(1);
    case 5: return fcntl(second, F_DUPFD, 0);
    case 6: return fcntl(1, F_DUPFD_CLOEXEC, 0);
    case 7: return fcntl(second, F_DUPFD, second + 1);
    case 8: return memfd_create("memory", 0);
    case 9: return eventfd(0, 0);
    case 10: return epoll_create1(0);
    case 11: return open_beside();
    case 12: return open("second", O_PATH);
    case 13: return open(".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    case 14: return open("..", O_RDONLY | O_DIRECTORY);
    case 15: return open(".", O_TMPFILE | O_RDWR, 0600);
    case 16: return open("none", O_RDONLY) < 0 ? make("fourth") : -1;
    case 17: return open("/none", O_RDONLY) < 0 ? open("/etc/passwd", O_RDONLY) : -1;
    case 18: return pipe(two) ? -1 : close(two[1]) ? -1 : two[0];
    case 19: return socketpair(AF_UNIX, SOCK_STREAM, 0, two) ? -1 : close(two[1]) ? -1 : two[0];
    case 20: return syscall(SYS_pidfd_open, getpid(), 0);
    case 21: return inotify_init1(0);
    }
    return -2;
}

/* The next number is the lowest free one, in every way to get a descriptor. */
static void next(void)
{
    int first = make("first"), second = make("second");
    say("first", first);
    say("second", second);
    for (int way = 0; way < 22; way++) {
        close(first);
        say("the number that was freed", make_one(way, second));
        if (way != 7)
            continue;
        close(second + 1);
        first = make("first");
    }
    /* Freed one after the other: LibFS's and the kernel's, in either order. */
    for (int order = 0; order < 6; order++) {
        close_range(3, ~0u, 0);
        int mine = order & 1 ? make("mine") : open("/dev/null", O_RDONLY);
        int theirs = order & 1 ? open("/dev/null", O_RDONLY) : make("mine");
        int another = make("another");
        if (order < 2) {
            close(mine);
            close(theirs);
        } else if (order < 4) {
            close(theirs);
            close(mine);
        } else {
            close(another);
            dup2(1, theirs);
            close(mine);
        }
        say("the lowest", make("lowest"));
        say("the next", open("/dev/null", O_RDONLY));
        say("and the next", make("next"));
        say("what follows", socket(AF_UNIX, SOCK_STREAM, 0));
    }
    /* One that is freed below another one, in several ways. */
    for (int way = 0; way < 6; way++) {
        close_range(3, ~0u, 0);
        int low = way == 3 ? open("/dev/null", O_RDONLY) : way == 5 ? open("low", O_PATH) : make("low");
        int twice = way == 1 ? dup(low) : -1;
        int high = make("high");
        if (way == 0)
            fcntl(low, F_SETFD, 0);
        close(high);
        if (way == 2)
            dup2(1, low);
        if (way == 3 || way == 4)
            close_range(low, way == 3 ? ~0u : low, 0);
        else
            close(low);
        say("the lowest", make("lowest"));
        say("the next", make("next"));
        say("and the next", dup(twice < 0 ? 1 : twice));
    }
    close_range(3, ~0u, 0);
    int input = dup(0);
    close(0);
    say("what is read from", make("input"));
    int above = make("above");
    close(above);
    close(0);
    say("what is read from", make("input"));
    dup2(input, 0);
    int kept = make("kept");
    say("a range that there is none of", close_range(0x80000000u, ~0u, 0));
    say("written", put(kept, "still here"));
    close_range(3, ~0u, 0);
    say("put at a number", dup2(1, just_closed()));
    say("written", put(3, "by the kernel\n"));
    say("closed", close(3));
    close(make("at"));
    say("put at a number by name", dup3(1, 3, O_CLOEXEC));
    say("closed", close(3));
    for (int number = 0; number < 3; number++) {
        int kept = dup(number);
        close(number);
        int file = make("standard");
        dup2(kept, number);
        close(kept);
        say("it was", file);
    }
}

/* A closed descriptor leads nowhere, for every call. */
static void nowhere(void)
{
    struct stat stat_of;
    struct statfs statfs_of;
    struct epoll_event event = {EPOLLIN};
    char text[512];
    int other = make("other"), poller = epoll_create1(0);
    put(other, "other");
#define TRY(call)                                                                                                                          \
    do {                                                                                                                                   \
        int gone = just_closed();                                                                                                          \
        say(#call, (long)(call));                                                                                                          \
    } while (0)
    TRY(close(gone));
    TRY(fstat(gone, &stat_of));
    TRY(fstatat(gone, "", &stat_of, AT_EMPTY_PATH));
    TRY(fstatat(gone, "other", &stat_of, 0));
    TRY(read(gone, text, 1));
    TRY(pread(gone, text, 1, 0));
    TRY(write(gone, text, 1));
    TRY(lseek(gone, 0, SEEK_END));
    TRY(fcntl(gone, F_GETFD));
    TRY(fcntl(gone, F_SETFD, FD_CLOEXEC));
    TRY(fcntl(gone, F_GETFL));
    TRY(fcntl(gone, F_SETFL, O_APPEND));
    TRY(fcntl(gone, F_DUPFD, 0));
    TRY(dup(gone));
    TRY(dup2(gone, 20));
    TRY(dup2(gone, gone));
    TRY(dup3(gone, 20, 0));
    TRY(openat(gone, "other", O_RDONLY));
    TRY(openat(gone, "new", O_RDWR | O_CREAT, 0600));
    TRY(fchdir(gone));
    TRY(fchmod(gone, 0600));
    TRY(fchown(gone, 0, 0));
    TRY(ftruncate(gone, 0));
    TRY(fsync(gone));
    TRY(syncfs(gone));
    TRY(flock(gone, LOCK_EX));
    TRY(ioctl(gone, FIONREAD, text));
    TRY(ioctl(gone, FIOCLEX));
    TRY(fstatfs(gone, &statfs_of));
    TRY(fgetxattr(gone, "user.one", text, sizeof text));
    TRY(mkdirat(gone, "directory", 0700));
    TRY(unlinkat(gone, "other", 0));
    TRY(renameat(gone, "other", AT_FDCWD, "moved"));
    TRY(renameat(AT_FDCWD, "other", gone, "moved"));
    TRY(linkat(gone, "", AT_FDCWD, "linked", AT_EMPTY_PATH));
    TRY(readlinkat(gone, "", text, sizeof text));
    TRY(syscall(SYS_getdents64, gone, text, sizeof text));
    TRY(mmap(NULL, 4096, PROT_READ, MAP_PRIVATE, gone, 0));
    TRY(mmap(NULL, 4096, PROT_READ, MAP_SHARED, gone, 0));
    TRY(sendfile(other, gone, NULL, 1));
    TRY(sendfile(gone, other, NULL, 1));
    TRY(copy_file_range(gone, NULL, other, NULL, 1, 0));
    TRY(epoll_ctl(poller, EPOLL_CTL_ADD, gone, &event));
    TRY(getsockopt(gone, SOL_SOCKET, SO_TYPE, text, &(socklen_t){4}));
    TRY(fallocate(gone, 0, 0, 1));
    TRY(posix_fadvise(gone, 0, 0, 0));
    for (int way = 0; way < 2; way++) {
        struct pollfd asked = {just_closed(), POLLIN};
        long ready = poll(&asked, 1, 0);
        say("poll", ready);
        say("it has", asked.revents);
    }
    int gone = just_closed();
    fd_set set;
    FD_ZERO(&set);
    FD_SET(gone, &set);
    struct timeval none = {0};
    say("select", select(gone + 1, &set, NULL, NULL, &none));
    char path[64];
    sprintf(path, "/proc/self/fd/%d", just_closed());
    say("its name", stat(path, &stat_of));
    just_closed();
    say("its link", readlink(path, text, sizeof text));
    just_closed();
    say("opened by its name", open(path, O_RDONLY));
    sprintf(path, "/dev/fd/%d", just_closed());
    say("opened by its other name", open(path, O_RDONLY));
    just_closed();
    DIR *listed = opendir("/proc/self/fd");
    int is_listed = 0;
    for (struct dirent *entry; (entry = readdir(listed));)
        is_listed += atoi(entry->d_name) == gone && dirfd(listed) != gone;
    say("listed", is_listed);
    gone = just_closed();
    rewinddir(listed);
    for (struct dirent *entry; (entry = readdir(listed));)
        is_listed += atoi(entry->d_name) == gone;
    say("listed", is_listed);
    closedir(listed);
}

/* Which of the first numbers lead somewhere now. */
static void left(void)
{
    char what[64];
    for (int number = 3; number < 12; number++) {
        int flags = fcntl(number, F_GETFD);
        sprintf(what, "of %d the flags", number);
        if (flags >= 0)
            say(what, flags);
    }
}

static void wait_for(const char *what, pid_t child)
{
    int status = -1;
    waitpid(child, &status, 0);
    say(what, status);
}

/* Other processes and programs find no closed file, and an opened file has the flags of its open. */
static void others(void)
{
    char *words[] = {self, "left", NULL};
    for (int round = 0; round < 4; round++) {
        int stays = round & 1 ? 0 : O_CLOEXEC;
        pid_t child;
        close(open("file", O_RDWR | O_CREAT | stays, 0600));
        if ((child = fork()) == 0) {
            left();
            int file = open("file", O_RDONLY);
            say("the child's", file);
            close(file);
            execv(self, words);
        }
        wait_for("a child", child);
        close(open("file", O_RDWR | stays));
        if ((child = vfork()) == 0) {
            execv(self, words);
            _exit(4);
        }
        wait_for("one with this one's memory", child);
        close(open("file", O_RDWR | stays));
        posix_spawn(&child, self, NULL, NULL, words, environ);
        wait_for("one that was spawned", child);
        close(open("file", O_RDWR | stays));
        say("a shell", system("true"));
        /* With the flag, and without, and changed. */
        close(open("file", O_RDWR | stays));
        int file = open("file", O_RDWR);
        say("its flags", fcntl(file, F_GETFD));
        fcntl(file, F_SETFD, FD_CLOEXEC);
        close(file);
        file = open("file", O_RDWR);
        say("its flags", fcntl(file, F_GETFD));
        ioctl(file, FIOCLEX);
        close(file);
        file = open("file", O_RDWR);
        say("its flags", fcntl(file, F_GETFD));
        close_range(file, file, CLOSE_RANGE_CLOEXEC);
        close(file);
        file = open("file", O_RDWR);
        say("its flags", fcntl(file, F_GETFD));
        close(file);
        file = open("file", O_RDWR | O_CLOEXEC);
        say("its flags", fcntl(file, F_GETFD));
        int twice = dup(file);
        close(file);
        file = open("file", O_RDWR);
        say("its flags", fcntl(file, F_GETFD));
        close(twice);
        say("another's", open("file", O_RDWR | O_CLOEXEC));
        say("its flags", fcntl(twice, F_GETFD));
        close_range(3, ~0u, 0);
    }
    close(open("file", O_RDWR));
    execv(self, words);
}

/* As many descriptors as the limit allows: a closed one makes room for one. */
static void limits(void)
{
    struct rlimit few = {24, 24};
    setrlimit(RLIMIT_NOFILE, &few);
    int last = -1, two[2], opened = 0;
    for (int file; (file = open("file", O_RDWR | O_CREAT, 0600)) >= 0; opened++)
        last = file;
    say("one more", -1);
    say("the last", last);
    for (int round = 0; round < 3; round++) {
        close(last);
        say("two more", pipe(two));
        say("one", socket(AF_UNIX, SOCK_STREAM, 0));
        close(last);
        say("one", dup(1));
        close(last);
        say("one", open("file", O_RDONLY | (round ? O_CLOEXEC : 0)));
        say("one more", open("file", O_RDONLY));
    }
    close(last);
    close(last - 1);
    say("two", pipe(two));
    say("the one", two[0]);
    say("the other", two[1]);
}

static void write_a_line(int signal)
{
    int file = open("log", O_WRONLY | O_CREAT | O_APPEND, 0600);
    put(file, "line\n");
    close(file);
    (void)signal;
}

/* A handler's opens and closes have no part in the descriptor that the interrupted call makes. */
static void interrupted(void)
{
    struct sigaction action = {.sa_handler = write_a_line, .sa_flags = SA_RESTART};
    sigaction(SIGALRM, &action, NULL);
    struct sockaddr_un address = {.sun_family = AF_UNIX, .sun_path = "socket"};
    chdir("/dev/shm");
    sprintf(address.sun_path, "freed-%d", getpid());
    int listener = socket(AF_UNIX, SOCK_STREAM, 0);
    bind(listener, (struct sockaddr *)&address, sizeof address);
    listen(listener, 5);
    for (int round = 0; round < 5; round++) {
        pid_t child = fork();
        if (child == 0) {
            usleep(60000);
            int peer = socket(AF_UNIX, SOCK_STREAM, 0);
            _exit(connect(peer, (struct sockaddr *)&address, sizeof address) != 0);
        }
        fchdir(open(home, O_PATH));
        struct itimerval soon = {.it_value = {.tv_usec = 20000}};
        setitimer(ITIMER_REAL, &soon, NULL);
        say("accepted", accept(listener, NULL, NULL));
        int file = make("file");
        say("and then", file);
        close(file);
        waitpid(child, NULL, 0);
        chdir("/dev/shm");
    }
    unlink(address.sun_path);
}

static void *read_a_file(void *nothing)
{
    char text[8];
    int file = open("file", O_RDONLY);
    read(file, text, sizeof text);
    close(file);
    return nothing;
}

static long count_mappings(void)
{
    long lines = 0;
    FILE *maps = fopen("/proc/self/maps", "r");
    for (int one; (one = fgetc(maps)) != EOF;)
        lines += one == '\n';
    fclose(maps);
    return lines;
}

/* A thread that ends closes nothing of the process. */
static void ends(void)
{
    close(make("file"));
    long before = 0;
    for (int round = 0; round < 500; round++) {
        pthread_t thread;
        pthread_create(&thread, NULL, read_a_file, NULL);
        pthread_join(thread, NULL);
        if (round == 50)
            before = count_mappings();
    }
    say("mappings are left", count_mappings() - before > 20);
}

#define THREADS 4
#define ROUNDS 3000

static void *open_and_close(void *which)
{
    char name[16], text[16];
    long bad = 0, number = (long)which;
    sprintf(name, "of-%ld", number);
    close(make(name));
    for (int round = 0; round < ROUNDS; round++) {
        int file = open(name, O_RDWR | (round % 3 ? 0 : O_CLOEXEC));
        memset(text, 0, sizeof text);
        bad += pwrite(file, name, 5, 0) != 5 || pread(file, text, 5, 0) != 5 || strncmp(text, name, 5) != 0;
        struct stat found;
        bad += fstat(file, &found) || !S_ISREG(found.st_mode);
        bad += close(file) != 0;
        if (round % 5 == number) {
            int socket_of = socket(AF_UNIX, SOCK_STREAM, 0);
            bad += fstat(socket_of, &found) || !S_ISSOCK(found.st_mode);
            bad += close(socket_of) != 0;
        }
        if (round % 100 == 50 + number) {
            pid_t child = fork();
            if (child == 0) {
                int theirs = open(name, O_RDONLY);
                _exit(read(theirs, text, 5) != 5 || strncmp(text, name, 5) != 0);
            }
            int status = -1;
            waitpid(child, &status, 0);
            bad += status != 0;
        }
    }
    return (void *)bad;
}

static void threads(void)
{
    pthread_t all[THREADS];
    for (long number = 0; number < THREADS; number++)
        pthread_create(&all[number], NULL, open_and_close, (void *)number);
    for (int number = 0; number < THREADS; number++) {
        void *bad;
        pthread_join(all[number], &bad);
        say("that went wrong", (long)bad);
    }
    say("the first number", make("first"));
    say("the second", open("/dev/null", O_RDONLY));
}

#define OWNERS 2
#define GUESSERS 8
#define GUESSING_SECONDS 2

static atomic_bool is_over;

/* Opens and closes a file of its own, which no other thread changes. */
static void *own(void *which)
{
    char name[16], text[16];
    long bad = 0;
    sprintf(name, "of-%ld", (long)which);
    while (!is_over) {
        int file = make(name);
        memset(text, 0, sizeof text);
        bad += pwrite(file, name, 4, 0) != 4 || pread(file, text, 4, 0) != 4 || strncmp(text, name, 4) != 0;
        bad += close(file) != 0;
    }
    return (void *)bad;
}

/* Reads by the numbers of those files. */
static void *guess(void *nothing)
{
    char text[16];
    long bad = 0;
    while (!is_over)
        for (int number = 3; number < 3 + OWNERS; number++)
            bad += pread(number, text, 4, 0) < 0 && errno == EIO;
    return (void *)bad;
}

/* A number that another thread closes at that moment leads to a file or nowhere. */
static void guessed(void)
{
    pthread_t all[OWNERS + GUESSERS];
    for (long number = 0; number < OWNERS + GUESSERS; number++)
        pthread_create(&all[number], NULL, number < OWNERS ? own : guess, (void *)number);
    sleep(GUESSING_SECONDS);
    is_over = true;
    for (int number = 0; number < OWNERS + GUESSERS; number++) {
        void *bad;
        pthread_join(all[number], &bad);
        say("that went wrong", (long)bad);
    }
}

#define USERS 8
#define NOBODY 65534
#define TURN_MICROSECONDS 3000
#define TURNING_SECONDS 4

/* Opens and closes one file. Those of another user may be refused it, but what is open can be used. */
static void *use(void *nothing)
{
    char text[16];
    long bad = 0;
    while (!is_over) {
        int file = open("shared", O_RDWR | O_CREAT, 0666);
        if (file < 0) {
            bad += errno != EACCES;
            continue;
        }
        bad += pwrite(file, "text", 4, 0) != 4;
        bad += pread(file, text, 4, 0) != 4;
        bad += close(file) != 0;
    }
    return (void *)bad;
}

/* Threads use a file while the process becomes another user, and itself again. */
static void users(void)
{
    pthread_t all[USERS];
    umask(0);
    for (long number = 0; number < USERS; number++)
        pthread_create(&all[number], NULL, use, NULL);
    for (time_t end = time(NULL) + TURNING_SECONDS; time(NULL) < end;) {
        if (seteuid(NOBODY) || (usleep(TURN_MICROSECONDS), seteuid(0)))
            say("another user", -1);
        usleep(TURN_MICROSECONDS);
    }
    is_over = true;
    for (int number = 0; number < USERS; number++) {
        void *bad;
        pthread_join(all[number], &bad);
        say("that went wrong", (long)bad);
    }
}

int main(int count, char **arguments)
{
    static const struct story stories[] = {{"next", next},     {"nowhere", nowhere}, {"others", others},
                                           {"left", left},     {"limits", limits},   {"threads", threads},
                                           {"ends", ends},     {"guessed", guessed}, {"interrupted", interrupted},
                                           {"users", users}};
    self = arguments[0];
    getcwd(home, sizeof home);
    return tell(stories, sizeof stories / sizeof *stories, count == 2 ? arguments[1] : "");
}
