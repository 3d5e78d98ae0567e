/* The tree in which calls are made: built before each sequence, printed after it, and removed. */
#define _GNU_SOURCE
#include "differ.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <sys/time.h>
#include <sys/xattr.h>
#include <time.h>
#include <unistd.h>

enum { PATH_ROOM = 4 * PATH_MAX };

/* ---- Output ---- */

void print_text(const char *format, ...)
{
    va_list list;
    va_start(list, format);
    vdprintf(1, format, list);
    va_end(list);
}

void stop_program(const char *what)
{
    dprintf(2, "differ: %s: %s\n", what, strerror(errno));
    exit(2);
}

/* Times of the run are all alike; others have been set. */
const char *name_of_time(long seconds, long nanoseconds)
{
    static char texts[4][64];
    static int next;
    static time_t start;
    if (start == 0)
        start = time(NULL);
    if (seconds >= start - 60 && seconds <= time(NULL) + 60)
        return "now";
    next = (next + 1) % 4;
    snprintf(texts[next], sizeof texts[next], "%ld.%09ld", seconds, nanoseconds);
    return texts[next];
}

/* Access times are not shown: Ashlar moves them for fewer reasons. Sizes of directories are each file system's own. */
static long shown_size(unsigned mode, long size)
{
    return S_ISDIR(mode) ? -1 : size;
}

void say_stat(struct step *step, const void *at)
{
    const struct stat *found = at;
    say(step, " %o %u:%u size %ld links %lu times %s %s device %lx", found->st_mode, found->st_uid, found->st_gid,
        shown_size(found->st_mode, found->st_size), (unsigned long)found->st_nlink, name_of_time(found->st_mtim.tv_sec, found->st_mtim.tv_nsec), name_of_time(found->st_ctim.tv_sec, found->st_ctim.tv_nsec),
        (unsigned long)found->st_rdev);
}

void say_statx(struct step *step, const void *at, unsigned mask)
{
    const struct statx *found = at;
    unsigned told = found->stx_mask & mask & STATX_BASIC_STATS;
    say(step, " mask %x", told);
    if (told & STATX_TYPE)
        say(step, " %o", found->stx_mode);
    if (told & STATX_UID)
        say(step, " %u:%u", found->stx_uid, found->stx_gid);
    if (told & STATX_SIZE)
        say(step, " size %ld", shown_size(found->stx_mode, (long)found->stx_size));
    if (told & STATX_NLINK)
        say(step, " links %u", found->stx_nlink);
    if (told & STATX_MTIME)
        say(step, " times %s %s", name_of_time(found->stx_mtime.tv_sec, found->stx_mtime.tv_nsec), name_of_time(found->stx_ctime.tv_sec, found->stx_ctime.tv_nsec));
}

/* ---- Removing ---- */

static void remove_below(const char *path, int depth)
{
    DIR *stream;
    struct dirent *entry;
    struct stat found;
    if (lstat(path, &found) < 0 || depth > 64)
        return;
    if (!S_ISDIR(found.st_mode)) {
        unlink(path);
        return;
    }
    chmod(path, 0700);
    stream = opendir(path);
    while (stream != NULL && (entry = readdir(stream)) != NULL) {
        char below[PATH_ROOM];
        if (strcmp(entry->d_name, ".") == 0 || strcmp(entry->d_name, "..") == 0)
            continue;
        snprintf(below, sizeof below, "%s/%s", path, entry->d_name);
        remove_below(below, depth + 1);
    }
    if (stream != NULL)
        closedir(stream);
    rmdir(path);
}

static void remove_xattrs(const char *path)
{
    char list[8192];
    ssize_t bytes = llistxattr(path, list, sizeof list), at;
    for (at = 0; at < bytes; at += (ssize_t)strlen(list + at) + 1)
        lremovexattr(path, list + at);
}

/* ---- Building ---- */

static void make_file(const char *name, mode_t mode, size_t bytes)
{
    static char content[16384];
    int file = open(name, O_CREAT | O_EXCL | O_WRONLY, 0600);
    size_t at;
    if (content[1] == 0)
        for (at = 0; at < sizeof content; at++)
            content[at] = (char)(at * 7 + at / 251);
    if (file < 0 || write(file, content, bytes) != (ssize_t)bytes || fchmod(file, mode) < 0 || close(file) < 0)
        stop_program(name);
}

static void make_directory(const char *name, mode_t mode)
{
    if (mkdir(name, 0700) < 0 || chmod(name, mode) < 0)
        stop_program(name);
}

static void make_link(const char *target, const char *name)
{
    if (symlink(target, name) < 0)
        stop_program(name);
}

/* The tree of another user, beside the world: as the driver has made it, whatever the sequence before did to it. */
static void reset_strange(void)
{
    static const char *const names[] = {"strange/open/theirs", "strange/readable", "strange/secret", "strange/shared", "strange/closed/in"};
    static const mode_t modes[] = {0644, 0644, 0600, 0666, 0666};
    size_t at;
    if (geteuid() == 0) {
        remove_below("strange", 0);
        make_directory("strange", 0755);
        make_directory("strange/open", 01777);
        make_directory("strange/closed", 0700);
        for (at = 0; at < sizeof names / sizeof *names; at++)
            make_file(names[at], modes[at], 130);
        return;
    }
    remove_below("strange/open", 0);
    remove_xattrs("strange/shared");
    if (truncate("strange/shared", 0) < 0 || truncate("strange/shared", 130) < 0)
        stop_program("strange/shared");
}

void build_world(void)
{
    static const struct timespec old[2] = {{1200000000, 11}, {1100000000, 12}};
    char target[PATH_MAX];
    int file;
    if (chdir(place) < 0)
        stop_program("chdir");
    reset_strange();
    make_directory("world", 0755);
    if (chdir("world") < 0)
        stop_program("chdir");
    make_file("a", 0644, 10000);
    make_file("b", 0600, 300);
    make_file("c", 0666, 0);
    make_file("n", 0, 20);
    make_file("r", 0444, 5000);
    make_file("s", 06755, 100);
    make_directory("d", 0755);
    make_file("d/x", 0640, 4096);
    make_directory("d/e", 0700);
    make_file("d/e/y", 0644, 1);
    make_directory("f", 0777);
    make_directory("z", 0700);
    make_file("z/in", 0644, 5);
    make_directory("k", 01777);
    make_file("k/own", 0644, 5);
    make_directory("g", 02775);
    make_link("a", "l");
    make_link("d", "m");
    make_link("nowhere", "o");
    make_link("p", "p");
    make_link("d/x", "q");
    make_link("a/", "u");
    make_link("l", "v");
    make_link("d/e/", "w");
    make_link("..", "d/up");
    snprintf(target, sizeof target, "%s/world/a", place);
    make_link(target, "abs");
    snprintf(target, sizeof target, "%s/world/d/", place);
    make_link(target, "abs2");
    /* libashlar opens none. */
    if (profile != PROFILE_CAPI && mkfifo("fifo", 0644) < 0)
        stop_program("fifo");
    if (link("d/x", "h") < 0 || chmod("z", 0) < 0)
        stop_program("names");
    file = open("sparse", O_CREAT | O_RDWR, 0644);
    if (file < 0 || ftruncate(file, 1 << 20) < 0 || pwrite(file, "data", 4, 512 << 10) != 4 || close(file) < 0)
        stop_program("sparse");
    if (setxattr("a", "user.one", "1", 1, 0) < 0 || setxattr("d", "user.two", "two", 3, 0) < 0)
        stop_program("setxattr");
    if (utimensat(AT_FDCWD, "a", old, 0) < 0 || utimensat(AT_FDCWD, "d", old, 0) < 0 || utimensat(AT_FDCWD, "l", old, AT_SYMLINK_NOFOLLOW) < 0)
        stop_program("utimensat");
}

/* ---- Printing ---- */

enum { IDENTITIES_MAX = 512, NAMES_MAX = 512, DEPTH_MAX = 12 };

static ino_t identities[IDENTITIES_MAX];
static int identities_used;

/* Numbers inodes in the order in which they are met; -1: not met in the tree. */
static int number_identity(ino_t inode, int is_in_tree)
{
    int at;
    for (at = 0; at < identities_used; at++)
        if (identities[at] == inode)
            return at;
    if (!is_in_tree)
        return -1;
    if (identities_used < IDENTITIES_MAX)
        identities[identities_used++] = inode;
    return at;
}

static uint64_t hash_content(int file, off_t size)
{
    static char block[4096];
    uint64_t hash = 3;
    off_t at = 0;
    long blocks = 0;
    while (at < size && blocks++ < 2048) {
        ssize_t count;
        size_t zeros;
        off_t data = lseek(file, at, SEEK_DATA);
        if (data < 0)
            break;
        at = data / 4096 * 4096;
        count = pread(file, block, sizeof block, at);
        if (count <= 0)
            break;
        for (zeros = 0; zeros < (size_t)count && block[zeros] == 0; zeros++)
            ;
        if (zeros < (size_t)count) {
            hash = hash_bytes(hash, &at, sizeof at);
            hash = hash_bytes(hash, block, (size_t)count);
        }
        at += count;
    }
    return hash;
}

static int compare_text(const void *one, const void *other)
{
    return strcmp(*(char *const *)one, *(char *const *)other);
}

static void say_xattrs(struct step *line, const char *path)
{
    static char list[8192], value[70000], *names[64];
    ssize_t bytes = llistxattr(path, list, sizeof list), at;
    int found = 0, name;
    if (bytes < 0) {
        say(line, " xattrs -%s", strerrorname_np(errno));
        return;
    }
    for (at = 0; at < bytes && found < 64; at += (ssize_t)strlen(list + at) + 1)
        names[found++] = list + at;
    qsort(names, (size_t)found, sizeof *names, compare_text);
    for (name = 0; name < found; name++) {
        ssize_t length = lgetxattr(path, names[name], value, sizeof value);
        say(line, " ");
        say_place(line, names[name], strlen(names[name]));
        say(line, "=%zd:%lx", length, length > 0 ? hash_bytes(5, value, (size_t)length) : 0);
    }
}

static void say_content(struct step *line, const char *path, const struct stat *found)
{
    char text[PATH_MAX];
    if (S_ISREG(found->st_mode)) {
        int file = open(path, O_RDONLY);
        if (file < 0)
            say(line, " -%s", strerrorname_np(errno));
        else {
            say(line, " content %016lx", hash_content(file, found->st_size));
            close(file);
        }
    } else if (S_ISLNK(found->st_mode)) {
        ssize_t bytes = readlink(path, text, sizeof text);
        say(line, " -> ");
        if (bytes > 0)
            say_place(line, text, (size_t)bytes);
    }
}

static void print_below(const char *path, size_t start, int depth)
{
    static struct step line;
    struct stat found;
    DIR *stream;
    struct dirent *entry;
    char **names;
    int count = 0, at;
    line.text_used = 0;
    say(&line, "  tree ");
    say_place(&line, path + start, strlen(path + start));
    if (lstat(path, &found) < 0) {
        print_text("%s -%s\n", line.text, strerrorname_np(errno));
        return;
    }
    say_stat(&line, &found);
    say(&line, " file %d", number_identity(found.st_ino, 1));
    say_xattrs(&line, path);
    say_content(&line, path, &found);
    print_text("%s\n", line.text);
    if (!S_ISDIR(found.st_mode) || depth == DEPTH_MAX)
        return;
    stream = opendir(path);
    if (stream == NULL) {
        print_text("  tree -%s\n", strerrorname_np(errno));
        return;
    }
    names = calloc(NAMES_MAX, sizeof *names);
    while (count < NAMES_MAX && (entry = readdir(stream)) != NULL)
        if (strcmp(entry->d_name, ".") != 0 && strcmp(entry->d_name, "..") != 0)
            names[count++] = strdup(entry->d_name);
    closedir(stream);
    qsort(names, (size_t)count, sizeof *names, compare_text);
    for (at = 0; at < count; at++) {
        char below[PATH_ROOM];
        snprintf(below, sizeof below, "%s/%s", path, names[at]);
        print_below(below, start, depth + 1);
        free(names[at]);
    }
    free(names);
}

void print_world(void)
{
    char path[PATH_ROOM];
    struct stat found;
    struct step line;
    int number;
    identities_used = 0;
    snprintf(path, sizeof path, "%s/world", place);
    print_below(path, strlen(place) + 1, 0);
    snprintf(path, sizeof path, "%s/strange", place);
    print_below(path, strlen(place) + 1, 0);
    if (profile == PROFILE_CAPI)
        return;
    for (number = FIRST_DESCRIPTOR; number < 40; number++) {
        line.text_used = 0;
        if (fstat(number, &found) < 0) {
            if (errno != EBADF)
                print_text("  descriptor %d -%s\n", number, strerrorname_np(errno));
            continue;
        }
        say_stat(&line, &found);
        say(&line, " file %d", number_identity(found.st_ino, 0));
        print_text("  descriptor %d flags %x %x offset %ld%s\n", number, (unsigned)fcntl(number, F_GETFL), (unsigned)fcntl(number, F_GETFD),
                   S_ISDIR(found.st_mode) ? -1 : (long)lseek(number, 0, SEEK_CUR), line.text);
    }
}

void remove_world(void)
{
    char path[PATH_ROOM];
    int number;
    for (number = FIRST_DESCRIPTOR; number < 40; number++)
        close(number);
    close(900);
    umask(022);
    if (chdir("/") < 0)
        stop_program("chdir");
    chmod(place, 0755);
    remove_xattrs(place);
    if (geteuid() == 0 && chown(place, 0, 0) < 0)
        stop_program("chown");
    snprintf(path, sizeof path, "%s/world", place);
    remove_below(path, 0);
    if (access(path, F_OK) == 0 || errno != ENOENT)
        stop_program("the world could not be removed");
}
