/* Draws the arguments of calls. They depend on the sequence's and the step's numbers alone, so that a step stays the
 * same if others are left out. */
#define _GNU_SOURCE
#include "differ.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <linux/falloc.h>
#include <linux/fiemap.h>
#include <linux/fs.h>
#include <linux/openat2.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <sys/uio.h>
#include <sys/xattr.h>
#include <unistd.h>

enum profile profile;
const char *place;

#define COUNT(list) (sizeof(list) / sizeof *(list))
#define PICK(list) ((list)[draw_below(COUNT(list))])

/* ---- Numbers ---- */

static uint64_t state;

static uint64_t draw_word(void)
{
    uint64_t word;
    state += 0x9e3779b97f4a7c15u;
    word = state;
    word = (word ^ (word >> 30)) * 0xbf58476d1ce4e5b9u;
    word = (word ^ (word >> 27)) * 0x94d049bb133111ebu;
    return word ^ (word >> 31);
}

void seed_draws(uint64_t sequence, uint64_t step)
{
    state = sequence;
    state = draw_word() + step;
    state = draw_word();
}

uint64_t draw_below(uint64_t bound)
{
    return draw_word() % bound;
}

int is_one_in(uint64_t many)
{
    return draw_below(many) == 0;
}

uint64_t hash_bytes(uint64_t hash, const void *bytes, size_t count)
{
    const unsigned char *at = bytes;
    for (; count >= 8; count -= 8, at += 8) {
        uint64_t word;
        memcpy(&word, at, 8);
        hash = (hash ^ word) * 0x9fb21c651e98df25u;
        hash ^= hash >> 29;
    }
    for (; count > 0; count--)
        hash = (hash ^ *at++) * 0x100000001b3u;
    return hash ^ (hash >> 32);
}

/* ---- Text ---- */

void say(struct step *step, const char *format, ...)
{
    va_list list;
    int written;
    size_t left = sizeof step->text - step->text_used;
    va_start(list, format);
    written = vsnprintf(step->text + step->text_used, left, format, list);
    va_end(list);
    if (written > 0)
        step->text_used += (size_t)written < left ? (size_t)written : left - 1;
}

void say_place(struct step *step, const char *text, size_t bytes)
{
    size_t length = strlen(place), at;
    if (bytes > 1024) {
        say(step, "%.20s... (%zu bytes, %016lx)", text, bytes, hash_bytes(1, text, bytes));
        return;
    }
    /* The beginning of the place's name, cut off. */
    if (bytes > 1 && bytes < length && memcmp(text, place, bytes) == 0) {
        say(step, "@*%zu", bytes);
        return;
    }
    for (at = 0; at < bytes;) {
        size_t run = 1;
        if (bytes - at >= length && memcmp(text + at, place, length) == 0) {
            say(step, "@");
            at += length;
            continue;
        }
        while (at + run < bytes && text[at + run] == text[at])
            run++;
        if (run > 20)
            say(step, "%c*%zu", text[at], run);
        else if (text[at] >= ' ' && text[at] <= '~')
            say(step, "%.*s", (int)run, text + at);
        else
            for (size_t number = 0; number < run; number++)
                say(step, "\\x%02x", (unsigned char)text[at]);
        at += run;
    }
}

/* ---- Memory ---- */

static char *buffer, *read_only, *forbidden;
/* Room for what pointers lead to: given anew for each step. */
static char *room;
static size_t room_used;
enum { ROOM_BYTES = 256 * 1024, PAGE = 4096 };

static char *map_pages(void *at, size_t bytes, int protection, int flags)
{
    void *mapped = mmap(at, bytes, protection, MAP_PRIVATE | MAP_ANONYMOUS | flags, -1, 0);
    if (mapped == MAP_FAILED)
        stop_program("mmap");
    return mapped;
}

void map_buffers(void)
{
    char *all = map_pages(NULL, BUFFER_BYTES + 4 * PAGE, PROT_NONE, MAP_NORESERVE);
    buffer = map_pages(all, BUFFER_BYTES, PROT_READ | PROT_WRITE, MAP_FIXED);
    forbidden = all + BUFFER_BYTES;
    read_only = map_pages(forbidden + 2 * PAGE, PAGE, PROT_READ, MAP_FIXED);
    room = map_pages(NULL, ROOM_BYTES, PROT_READ | PROT_WRITE, 0);
}

static void *take_room(size_t bytes)
{
    char *at = room + room_used;
    bytes = (bytes + 63) / 64 * 64;
    if (room_used + bytes > ROOM_BYTES)
        stop_program("room");
    room_used += bytes;
    memset(at, 0, bytes);
    return at;
}

static void push(struct step *step, long argument)
{
    if (step->arguments_used == ARGUMENTS_MAX)
        stop_program("too many arguments");
    step->arguments[step->arguments_used++] = argument;
}

static void push_output(struct step *step, char kind, const void *at, size_t bytes)
{
    struct output output = {kind, at, bytes};
    if (step->outputs_used < OUTPUTS_MAX)
        step->outputs[step->outputs_used++] = output;
}

/* Perhaps a pointer that leads nowhere, which is then printed; a null pointer if the library dereferences others. */
static int is_bad_pointer(struct step *step, long *pointer)
{
    static const struct {
        const char *name;
        long value;
    } bad[] = {{"NULL", 0}, {"1", 1}, {"KERNEL", (long)0xffff888000000000}, {"TWISTED", (long)0x8000000000000000}};
    size_t which;
    if (!is_one_in(60))
        return 0;
    which = profile == PROFILE_CAPI ? 0 : draw_below(COUNT(bad) + 1);
    if (which == COUNT(bad)) {
        *pointer = (long)forbidden;
        say(step, "FORBIDDEN");
    } else {
        *pointer = bad[which].value;
        say(step, "%s", bad[which].name);
    }
    return 1;
}

/* ---- Kinds of arguments ---- */

/* Flags of a set, some of them by chance, with their names. */
struct flag {
    const char *name;
    long value;
    int many;
};

static long draw_flags(struct step *step, const struct flag *flags, size_t count)
{
    long drawn = 0;
    size_t at;
    const char *between = "";
    for (at = 0; at < count; at++)
        if (is_one_in((uint64_t)flags[at].many)) {
            drawn |= flags[at].value;
            say(step, "%s%s", between, flags[at].name);
            between = "|";
        }
    if (drawn == 0)
        say(step, "0");
    return drawn;
}
#define FLAGS(step, flags) draw_flags(step, flags, COUNT(flags))
#define F(name, many) {#name, name, many}

static void draw_descriptor(struct step *step)
{
    static const int odd[] = {-1, 999999, 40, INT_MIN, AT_FDCWD};
    uint64_t one = draw_below(7), two = draw_below(7);
    int drawn = FIRST_DESCRIPTOR + (int)(one < two ? one : two);
    /* The kernel's calls have a meaning of their own for AT_FDCWD. */
    if (is_one_in(25))
        drawn = odd[draw_below(COUNT(odd) - (profile == PROFILE_CAPI))];
    say(step, "%d", drawn);
    push(step, drawn);
}

static void draw_directory_descriptor(struct step *step)
{
    if (draw_below(10) < 6) {
        say(step, "AT_FDCWD");
        push(step, AT_FDCWD);
    } else
        draw_descriptor(step);
}

static const char *draw_name(void)
{
    static const char *const names[] = {"a", "a", "b", "c", "n", "r", "s", "h", "d", "d", "f", "z", "k", "g", "l", "m", "o", "p", "q",
                                        "u", "v", "w", "x", "y", "e", "sparse", "fifo", "new", "new2", ".", "up", "abs", "abs2"};
    return PICK(names);
}

/* A path below the world, as a rule of something that is there. */
static void draw_path_text(char *text)
{
    static const char *const known[] = {"a", "b", "c", "n", "r", "s", "h", "d", "d/x", "d/e", "d/e/y", "f", "z", "z/in", "k", "k/own", "g",
                                        "l", "m", "m/x", "m/e", "o", "p", "q", "u", "v", "sparse", "w", "abs", "abs2", "d/up", "fifo",
                                        "new", "new2", "d/new", "f/new", "m/new", "k/new", "g/new", "d/e/new", "z/new",
                                        "../strange/open/new", "../strange/open/theirs", "../strange/readable", "../strange/secret",
                                        "../strange/shared", "../strange/closed/in", "../strange", "../strange/open"};
    static const char *const before[] = {"./", "d/../", "../world/", "m/../", "d/e/../../", ".//", "d//../", "f/./../", "a/../", "none/../"};
    static const char *const behind[] = {"/", "/", "/", "/.", "/..", "//", "/./", "/../a", "/a", "/x", "/new", "/e/.."};
    size_t at;
    text[0] = 0;
    if (is_one_in(12)) {
        strcpy(text, place);
        strcat(text, "/world/");
    } else if (is_one_in(10))
        strcpy(text, PICK(before));
    if (is_one_in(10)) {
        strcat(text, draw_name());
        for (at = draw_below(3); at > 0; at--) {
            strcat(text, "/");
            strcat(text, draw_name());
        }
    } else
        strcat(text, PICK(known));
    if (is_one_in(9))
        strcat(text, PICK(behind));
}

/* Long paths: a name as long as names may be, or longer; a path as long as paths may be, or longer. */
static void draw_long_path(char *text)
{
    size_t length, at = 0;
    if (is_one_in(2)) {
        static const char *const directories[] = {"", "d/", "a/", "none/"};
        length = 254 + draw_below(3);
        strcpy(text, PICK(directories));
        at = strlen(text);
        memset(text + at, 'L', length);
        text[at + length] = 0;
        return;
    }
    /* libashlar's paths are longer than the kernel's by what leads to the world. */
    length = profile == PROFILE_CAPI ? 5000 : 4094 + draw_below(4);
    for (at = 0; at + 2 < length; at += 2)
        memcpy(text + at, "./", 2);
    while (at + 1 < length)
        text[at++] = '/';
    text[at] = 'a';
    text[at + 1] = 0;
}

static void draw_path(struct step *step)
{
    long pointer;
    char *text;
    if (is_one_in(3) && is_bad_pointer(step, &pointer)) {
        push(step, pointer);
        return;
    }
    text = take_room(PATH_MAX + 1200);
    if (is_one_in(60))
        draw_long_path(text);
    else if (!is_one_in(60))
        draw_path_text(text);
    say(step, "\"");
    say_place(step, text, strlen(text));
    say(step, "\"");
    push(step, (long)text);
}

static void draw_target(struct step *step)
{
    /* None leads out of the place: the super-user's calls would change what they find there. */
    static const char *const targets[] = {"a", "d", "d/x", "nowhere", "new", "../world/a", "f/", "a/", "..", ".", "l", "new2", "f//"};
    char *text = take_room(PATH_MAX + 1200);
    long pointer;
    if (is_bad_pointer(step, &pointer)) {
        push(step, pointer);
        return;
    }
    if (is_one_in(30)) {
        size_t length = 4094 + draw_below(3);
        memset(text, 'T', length);
    } else if (is_one_in(8)) {
        strcpy(text, place);
        strcat(text, "/world/d");
    } else if (!is_one_in(30))
        strcpy(text, PICK(targets));
    say(step, "\"");
    say_place(step, text, strlen(text));
    say(step, "\"");
    push(step, (long)text);
}

static long draw_open_flags(struct step *step)
{
    static const struct flag access[] = {{"O_RDONLY", 0, 1}, F(O_WRONLY, 1), F(O_RDWR, 1), {"O_ACCMODE", O_ACCMODE, 1}};
    static const struct flag flags[] = {F(O_CREAT, 3),    F(O_EXCL, 8),     F(O_TRUNC, 8),   F(O_APPEND, 7),   F(O_DIRECTORY, 7),
                                        F(O_NOFOLLOW, 9), F(O_CLOEXEC, 5),  F(O_SYNC, 30),   F(O_DSYNC, 30),
                                        F(O_TMPFILE, 14), F(O_NOCTTY, 50), F(O_LARGEFILE, 40)};
    static const struct flag kernel_flags[] = {F(O_PATH, 10), F(O_DIRECT, 50), F(O_NOATIME, 25), {"O_ASYNC", O_ASYNC, 100}, {"0x40000000", 0x40000000, 60}};
    static const int shares[] = {0, 0, 1, 1, 1, 2, 2, 2, 2, 3};
    const struct flag *one = &access[PICK(shares)];
    /* FIFOs are not waited for. */
    long drawn = one->value | O_NONBLOCK;
    if (one->value == O_ACCMODE && (profile == PROFILE_CAPI || !is_one_in(6)))
        drawn = O_RDWR | O_NONBLOCK, one = &access[2];
    say(step, "%s|O_NONBLOCK|", one->name);
    drawn |= FLAGS(step, flags);
    if (profile != PROFILE_CAPI) {
        say(step, "|");
        drawn |= FLAGS(step, kernel_flags);
    }
    return drawn;
}

static long draw_mode(void)
{
    static const long modes[] = {0644, 0600, 0666, 0755, 0777, 0, 0444, 0200, 0111, 01777, 02755, 04755, 06777, 0640, 0700};
    static const long odd[] = {S_IFREG | 0644, S_IFDIR | 0755, 0177777, -1, 010000000};
    return is_one_in(20) && profile != PROFILE_CAPI ? PICK(odd) : PICK(modes);
}

static long draw_offset(void)
{
    static const long usual[] = {0, 0, 1, 5, 100, 511, 512, 1000, 1024, 4095, 4096, 4097, 8192, 9999, 10000, 10001, 65536, 524288, 1048576};
    static const long edge[] = {-1, LONG_MIN, INT_MAX, 1L << 31, (1L << 32) - 1, 1L << 32, (1L << 32) + 1, -4096};
    static const long huge[] = {LONG_MAX, LONG_MAX - 1, LONG_MAX - 4095, LONG_MAX - 4096, 1L << 62, 1L << 44, (1L << 44) - 4096, 1L << 52};
    if (profile == PROFILE_HUGE && is_one_in(3))
        return PICK(huge);
    return is_one_in(10) ? PICK(edge) : PICK(usual);
}

static size_t draw_length(void)
{
    static const size_t usual[] = {0, 1, 2, 3, 5, 100, 511, 512, 1000, 1024, 1025, 4095, 4096, 4097, 8192, 10000, 65536, 131072};
    return PICK(usual);
}

static size_t draw_copied(void)
{
    static const size_t edge[] = {INT_MAX, 1UL << 31, 1UL << 32, LONG_MAX, 1UL << 63, ULONG_MAX};
    return is_one_in(15) ? PICK(edge) : draw_length();
}

/* Bytes that a call writes: the same for a step wherever it is made. */
static void fill_buffer(char *at, size_t bytes)
{
    uint64_t word = draw_below(1000003) + 1;
    size_t place_in;
    if (is_one_in(8)) {
        memset(at, 0, bytes);
        return;
    }
    for (place_in = 0; place_in + 8 <= bytes; place_in += 8) {
        word = word * 0x5851f42d4c957f2d + 0x14057b7ef767814f;
        memcpy(at + place_in, &word, 8);
    }
    memset(at + place_in, (int)(word & 0xff), bytes - place_in);
}

/* A buffer and its length: as a rule whole, else at the edge of what may be touched, or nowhere. */
static void draw_buffer(struct step *step, int is_input, int is_part, long *pointer, long *bytes)
{
    static const long excessive[] = {INT_MAX, 1L << 31, 1L << 32, LONG_MAX, LONG_MIN, -1};
    size_t length = draw_length(), there;
    *bytes = (long)length;
    if (!is_part && is_bad_pointer(step, pointer)) {
        say(step, ", %ld", *bytes);
        return;
    }
    *pointer = (long)buffer;
    if (is_one_in(5))
        *pointer += (long)draw_below(200);
    there = length;
    if (profile != PROFILE_CAPI && is_one_in(70)) {
        there = (size_t)PICK(((size_t[]){0, 1, 100, 4095, 4096, 5000}));
        *pointer = (long)(forbidden - there);
        say(step, "EDGE-%zu", there);
        if (there > length)
            there = length;
    } else if (profile != PROFILE_CAPI && is_one_in(80)) {
        *bytes = PICK(excessive);
        there = BUFFER_BYTES / 2;
        say(step, "buffer");
    } else if (profile != PROFILE_CAPI && !is_input && is_one_in(100)) {
        *pointer = (long)read_only;
        there = 0;
        say(step, "READ_ONLY");
    } else
        say(step, "buffer");
    say(step, ", %ld", *bytes);
    if (is_input)
        fill_buffer((char *)*pointer, there);
    else {
        memset((char *)*pointer, 0xee, there);
        push_output(step, 'R', (void *)*pointer, there);
    }
}

static void draw_vector(struct step *step, int is_input)
{
    static const long counts[] = {0, 1, 1, 2, 2, 3, 3, 4};
    static const long odd[] = {-1, 1025, 1024, INT_MAX};
    long count = PICK(counts), at, pointer, bytes;
    struct iovec *parts = take_room(1025 * sizeof *parts);
    if (is_bad_pointer(step, &pointer)) {
        say(step, ", %ld", count);
        push(step, pointer);
        push(step, count);
        return;
    }
    say(step, "{");
    for (at = 0; at < count; at++) {
        size_t outputs = (size_t)step->outputs_used;
        /* Parts lie one behind the other, so that each is seen. */
        draw_buffer(step, is_input, profile == PROFILE_CAPI, &pointer, &bytes);
        if (pointer >= (long)buffer && pointer < (long)buffer + 4096 && bytes >= 0 && bytes <= 131072) {
            long moved = (long)buffer + at * (BUFFER_BYTES / 4);
            if (bytes > BUFFER_BYTES / 4)
                bytes = BUFFER_BYTES / 4;
            if (is_input)
                memmove((char *)moved, (char *)pointer, (size_t)bytes);
            else
                memset((char *)moved, 0xee, (size_t)bytes);
            pointer = moved;
            if ((size_t)step->outputs_used > outputs) {
                step->outputs[outputs].at = (void *)moved;
                step->outputs[outputs].bytes = (size_t)bytes;
            }
        }
        parts[at].iov_base = (void *)pointer;
        parts[at].iov_len = (size_t)bytes;
        say(step, "; ");
    }
    for (at = 0; at < step->outputs_used; at++)
        if (step->outputs[at].kind == 'R')
            step->outputs[at].kind = 'V';
    if (is_one_in(30))
        count = PICK(odd);
    say(step, "}, %ld", count);
    push(step, (long)parts);
    push(step, count);
}

static void draw_status(struct step *step, char kind, size_t bytes)
{
    long pointer;
    char *at = take_room(bytes);
    if (!is_bad_pointer(step, &pointer)) {
        pointer = (long)at;
        say(step, "&");
        push_output(step, kind, at, bytes);
    }
    push(step, pointer);
}

static void draw_times(struct step *step)
{
    static const struct timespec times[] = {{1000000000, 5},       {1500000000, 999999999}, {0, UTIME_NOW},         {0, UTIME_OMIT},
                                            {1, 0},                {0, 0},                  {1300000000, 123456789}, {0, UTIME_NOW},
                                            {-5, 7},               {4000000000, 1},         {100, UTIME_OMIT},      {2000000000, 0}};
    static const struct timespec wrong[] = {{5, 1000000000}, {5, -1}, {7, 0x7fffffff}};
    struct timespec *drawn = take_room(2 * sizeof *drawn);
    long pointer;
    size_t at;
    if (is_one_in(6)) {
        say(step, "NULL");
        push(step, 0);
        return;
    }
    if (is_bad_pointer(step, &pointer)) {
        push(step, pointer);
        return;
    }
    for (at = 0; at < 2; at++) {
        drawn[at] = is_one_in(15) ? PICK(wrong) : PICK(times);
        if (drawn[at].tv_nsec == UTIME_NOW || drawn[at].tv_nsec == UTIME_OMIT)
            say(step, "%s%s", at ? "; " : "{", drawn[at].tv_nsec == UTIME_NOW ? "NOW" : "OMIT");
        else
            say(step, "%s%ld.%ld", at ? "; " : "{", (long)drawn[at].tv_sec, drawn[at].tv_nsec);
    }
    say(step, "}");
    push(step, (long)drawn);
}

static void draw_xattr_name(struct step *step)
{
    static const char *const names[] = {"user.one", "user.one", "user.two", "user.empty", "user.new", "user.", "trusted.one", "security.one",
                                        "system.posix_acl_access", "system.posix_acl_default", "system.other", "other.one", "one", "",
                                        "user", "security.two", "userx.one", "USER.one"};
    char *text = take_room(400);
    long pointer;
    if (is_bad_pointer(step, &pointer)) {
        push(step, pointer);
        return;
    }
    if (is_one_in(30)) {
        strcpy(text, "user.");
        memset(text + 5, 'N', 249 + draw_below(3));
    } else
        strcpy(text, PICK(names));
    say(step, "\"");
    say_place(step, text, strlen(text));
    say(step, "\"");
    push(step, (long)text);
}

/* A value to be set: bytes, or an access list that can be or can't. */
static void draw_xattr_value(struct step *step)
{
    static const size_t lengths[] = {0, 1, 3, 10, 100, 300};
    static const unsigned char small_list[] = {2, 0, 0, 0, 1, 0, 6, 0, 255, 255, 255, 255, 4, 0, 4, 0, 255, 255, 255, 255, 32, 0, 0, 0, 255, 255, 255, 255};
    static const unsigned char list[] = {2,   0,   0,   0,   1, 0, 7, 0, 255, 255, 255, 255, 2,  0, 5, 0, 1,   0,   0,   0,   4,  0, 5, 0,
                                         255, 255, 255, 255, 16, 0, 7, 0, 255, 255, 255, 255, 32, 0, 1, 0, 255, 255, 255, 255};
    size_t length = PICK(lengths);
    long pointer;
    if (is_bad_pointer(step, &pointer)) {
        say(step, ", %zu", length);
    } else {
        pointer = (long)buffer;
        fill_buffer(buffer, length);
        say(step, "bytes");
        switch (draw_below(14)) {
        case 0:
            memcpy(buffer, small_list, length = sizeof small_list);
            say(step, " of a small list");
            break;
        case 1:
            memcpy(buffer, list, length = sizeof list);
            say(step, " of a list");
            break;
        case 2:
            length = 65537;
            break;
        }
        say(step, ", %zu", length);
    }
    push(step, pointer);
    push(step, (long)length);
}

static void draw_xattr_room(struct step *step, char kind)
{
    static const size_t lengths[] = {0, 1, 3, 10, 100, 500, 4096, 65536, 65537, 131072};
    size_t length = PICK(lengths);
    long pointer;
    if (!is_bad_pointer(step, &pointer)) {
        pointer = (long)buffer;
        memset(buffer, 0xee, length);
        say(step, "buffer");
        push_output(step, kind, buffer, length);
    }
    say(step, ", %zu", length);
    push(step, pointer);
    push(step, (long)length);
}

/* A pointer to an offset, which the call moves; as a rule none. */
static void draw_moved_offset(struct step *step)
{
    long *offset = take_room(sizeof *offset), pointer;
    if (is_one_in(2)) {
        say(step, "NULL");
        push(step, 0);
        return;
    }
    if (is_bad_pointer(step, &pointer)) {
        push(step, pointer);
        return;
    }
    *offset = draw_offset();
    say(step, "&%ld", *offset);
    push(step, (long)offset);
    push_output(step, 'j', offset, sizeof *offset);
}

static void draw_lock(struct step *step, long command, const char *name)
{
    struct flock *lock = take_room(sizeof *lock);
    static const short types[] = {F_RDLCK, F_WRLCK, F_WRLCK, F_UNLCK, 7};
    static const short whences[] = {SEEK_SET, SEEK_SET, SEEK_SET, SEEK_CUR, SEEK_END, 5};
    long pointer;
    say(step, "%s, ", name);
    push(step, command);
    if (profile != PROFILE_CAPI && is_bad_pointer(step, &pointer)) {
        push(step, pointer);
        return;
    }
    lock->l_type = is_one_in(15) ? types[4] : types[draw_below(4)];
    lock->l_whence = profile == PROFILE_CAPI ? SEEK_SET : is_one_in(30) ? whences[5] : whences[draw_below(5)];
    lock->l_start = is_one_in(4) ? draw_offset() : (long)draw_below(10);
    lock->l_len = is_one_in(4) ? draw_offset() : (long)draw_below(5);
    /* libashlar counts bytes from the start on. */
    if (profile == PROFILE_CAPI && lock->l_len < 0)
        lock->l_len = 0;
    lock->l_pid = profile != PROFILE_CAPI && is_one_in(20);
    say(step, "{type %d, whence %d, %ld, %ld, pid %d}", lock->l_type, lock->l_whence, (long)lock->l_start, (long)lock->l_len, lock->l_pid);
    push(step, (long)lock);
    push_output(step, command == F_GETLK || command == F_OFD_GETLK ? 'K' : 0, lock, sizeof *lock);
}

static long draw_new_descriptor(void)
{
    static const long numbers[] = {3, 4, 5, 6, 7, 9, 12, 20, 30, -1, 1000000, INT_MAX, 900};
    return PICK(numbers);
}

#ifndef F_CREATED_QUERY
#define F_CREATED_QUERY 1028
#define F_DUPFD_QUERY 1027
#endif

static void draw_fcntl(struct step *step)
{
    static const struct flag plain[] = {F(F_GETFD, 1),      F(F_GETFL, 1),        F(F_GETFL, 1),         F(F_GETFL, 1),       F(F_GETOWN, 1),
                                        F(F_GETSIG, 1),     F(F_GETPIPE_SZ, 1),   F(F_GET_SEALS, 1),     F(F_ADD_SEALS, 1),   F(F_SETPIPE_SZ, 1),
                                        {"99", 99, 1},      {"-1", -1, 1},        F(F_GETLEASE, 1),      F(F_CREATED_QUERY, 1), F(F_SETSIG, 1)};
    static const struct flag status[] = {F(O_APPEND, 3),   F(O_NONBLOCK, 1),  F(O_NOATIME, 10), F(O_DIRECT, 30),
                                         F(O_ASYNC, 20),   F(O_SYNC, 20),     F(O_WRONLY, 20),  F(O_TRUNC, 20)};
    const struct flag *one;
    uint64_t *hint;
    switch (draw_below(11)) {
    case 0:
        say(step, "F_DUPFD, ");
        push(step, F_DUPFD);
        goto number;
    case 1:
        say(step, "F_DUPFD_CLOEXEC, ");
        push(step, F_DUPFD_CLOEXEC);
    number:
        push(step, draw_new_descriptor());
        say(step, "%ld", step->arguments[2]);
        return;
    case 2:
        push(step, F_SETFD);
        push(step, (long)draw_below(3));
        say(step, "F_SETFD, %ld", step->arguments[2]);
        return;
    case 3:
    case 4:
        say(step, "F_SETFL, ");
        push(step, F_SETFL);
        push(step, FLAGS(step, status));
        return;
    case 5:
        draw_lock(step, F_GETLK, "F_GETLK");
        return;
    case 6:
    case 7:
        draw_lock(step, F_SETLK, "F_SETLK");
        return;
    case 8:
        if (is_one_in(2))
            draw_lock(step, F_OFD_GETLK, "F_OFD_GETLK");
        else
            draw_lock(step, F_OFD_SETLK, "F_OFD_SETLK");
        return;
    case 9:
        if (is_one_in(3)) {
            hint = take_room(sizeof *hint);
            push(step, is_one_in(2) ? F_GET_RW_HINT : F_SET_RW_HINT);
            *hint = draw_below(8);
            say(step, "%s, &%lu", step->arguments[1] == F_GET_RW_HINT ? "F_GET_RW_HINT" : "F_SET_RW_HINT", *hint);
            push(step, (long)hint);
            if (step->arguments[1] == F_GET_RW_HINT)
                push_output(step, 'j', hint, sizeof *hint);
            return;
        }
        /* fall through */
    default:
        one = &PICK(plain);
        /* Files in memory have seals. */
        if (profile == PROFILE_HUGE && (one->value == F_GET_SEALS || one->value == F_ADD_SEALS))
            one = &plain[0];
        push(step, one->value);
        push(step, 0);
        say(step, "%s, 0", one->name);
    }
}

static void draw_ioctl(struct step *step)
{
    static const struct {
        const char *name;
        unsigned long value;
        char kind;
        size_t bytes;
    } commands[] = {{"FIONREAD", FIONREAD, 'I', 4},
                    {"FIGETBSZ", FIGETBSZ, 'I', 4},
                    {"FIOCLEX", FIOCLEX, 0, 8},
                    {"FIONCLEX", FIONCLEX, 0, 8},
                    {"FIOQSIZE", FIOQSIZE, 0, 8},
                    {"FICLONE", FICLONE, 'f', 0},
                    {"FIBMAP", FIBMAP, 0, 4},
                    {"FIONBIO", FIONBIO, 0, 4},
                    {"FS_IOC_GETFLAGS", FS_IOC_GETFLAGS, 0, 8},
                    {"TIOCGWINSZ", TIOCGWINSZ, 0, 64},
                    {"0x12345678", 0x12345678, 0, 64},
                    {"BLKGETSIZE64", BLKGETSIZE64, 0, 8}};
    size_t which = draw_below(COUNT(commands));
    long pointer;
    say(step, "%s, ", commands[which].name);
    push(step, (long)commands[which].value);
    if (commands[which].kind == 'f')
        draw_descriptor(step);
    else if (is_bad_pointer(step, &pointer))
        push(step, pointer);
    else {
        int *at = take_room(commands[which].bytes);
        /* FIFOs stay such as are not waited for. */
        *at = commands[which].value == FIONBIO;
        say(step, "&%d", *at);
        push(step, (long)at);
        push_output(step, commands[which].kind, at, commands[which].bytes);
    }
}

static void draw_how(struct step *step)
{
    static const struct flag resolve[] = {F(RESOLVE_BENEATH, 8), F(RESOLVE_IN_ROOT, 8), F(RESOLVE_NO_SYMLINKS, 8), F(RESOLVE_NO_MAGICLINKS, 8),
                                          F(RESOLVE_NO_XDEV, 8), {"0x400", 0x400, 50}};
    struct open_how *how = take_room(4096);
    static const long sizes[] = {24, 24, 24, 24, 24, 24, 24, 0, 23, 32, 64, 4097};
    long pointer, size = PICK(sizes);
    if (is_bad_pointer(step, &pointer)) {
        push(step, pointer);
    } else {
        say(step, "{");
        how->flags = (uint64_t)draw_open_flags(step);
        how->mode = is_one_in(10) || how->flags & (O_CREAT | __O_TMPFILE) ? (uint64_t)draw_mode() : 0;
        say(step, ", 0%lo, ", (unsigned long)how->mode);
        how->resolve = (uint64_t)FLAGS(step, resolve);
        if (size > 24 && is_one_in(2)) {
            ((char *)how)[28] = 1;
            say(step, ", more");
        }
        say(step, "}");
        push(step, (long)how);
    }
    say(step, ", %ld", size);
    push(step, size);
}

static void draw_kind(struct step *step, char kind)
{
    static const struct flag stat_flags[] = {F(AT_SYMLINK_NOFOLLOW, 4), F(AT_EMPTY_PATH, 6), F(AT_NO_AUTOMOUNT, 20), F(AT_STATX_DONT_SYNC, 30),
                                             {"0x8", 8, 60}, F(AT_SYMLINK_FOLLOW, 50)};
    static const struct flag access_flags[] = {F(AT_EACCESS, 4), F(AT_SYMLINK_NOFOLLOW, 6), F(AT_EMPTY_PATH, 6), {"0x8", 8, 60}};
    static const struct flag link_flags[] = {F(AT_SYMLINK_FOLLOW, 3), F(AT_EMPTY_PATH, 5), {"0x8", 8, 60}, F(AT_SYMLINK_NOFOLLOW, 60)};
    static const struct flag unlink_flags[] = {F(AT_REMOVEDIR, 3), {"0x8", 8, 60}, F(AT_SYMLINK_NOFOLLOW, 60)};
    static const struct flag rename_flags[] = {F(RENAME_NOREPLACE, 6), F(RENAME_EXCHANGE, 4), F(RENAME_WHITEOUT, 12), {"0x8", 8, 60}};
    static const struct flag chmod_flags[] = {F(AT_SYMLINK_NOFOLLOW, 5), F(AT_EMPTY_PATH, 6), {"0x8", 8, 60}};
    static const struct flag rwf[] = {F(RWF_HIPRI, 20), F(RWF_DSYNC, 12), F(RWF_SYNC, 12), F(RWF_APPEND, 6), {"RWF_NOAPPEND", 0x20, 10}, {"0x8000", 0x8000, 40}};
    static const struct flag xattr_flags[] = {F(XATTR_CREATE, 5), F(XATTR_REPLACE, 5), {"0x8", 8, 60}};
    static const struct flag fallocate_flags[] = {F(FALLOC_FL_KEEP_SIZE, 2), F(FALLOC_FL_PUNCH_HOLE, 4), F(FALLOC_FL_ZERO_RANGE, 5),
                                                  {"0x8000", 0x8000, 60}, F(FALLOC_FL_NO_HIDE_STALE, 60)};
    static const struct flag sync_flags[] = {F(SYNC_FILE_RANGE_WAIT_BEFORE, 2), F(SYNC_FILE_RANGE_WRITE, 2), F(SYNC_FILE_RANGE_WAIT_AFTER, 2),
                                             {"0x8", 8, 60}};
    static const struct flag lock_flags[] = {F(LOCK_NB, 1), {"0x8000", 0x8000, 60}};
    static const unsigned masks[] = {STATX_BASIC_STATS, STATX_BASIC_STATS, STATX_ALL, 0, STATX_SIZE, STATX_MODE | STATX_NLINK, 0x80000000};
    static const long owners[] = {-1, -1, 0, 65534, 65534, 1, 1000, 0xfffffffe};
    static const long whences[] = {SEEK_SET, SEEK_SET, SEEK_CUR, SEEK_END, SEEK_DATA, SEEK_HOLE, 5, -1};
    static const int operations[] = {LOCK_SH, LOCK_EX, LOCK_UN, 0, LOCK_SH | LOCK_EX};
    static const long devices[] = {0, 0x103, 0x105};
    static const long kinds[] = {0, S_IFREG, S_IFIFO, S_IFSOCK, S_IFCHR, S_IFDIR, S_IFLNK, 0170000};
    long first, second;
    switch (kind) {
    case 'd': draw_directory_descriptor(step); return;
    case 'f': draw_descriptor(step); return;
    case 'N': push(step, draw_new_descriptor()); break;
    case 'p': draw_path(step); return;
    case 't': draw_target(step); return;
    case 'o': push(step, draw_open_flags(step)); return;
    case 'B': draw_how(step); return;
    case 'm': push(step, draw_mode()); say(step, "0%lo", (unsigned long)step->arguments[step->arguments_used - 1]); return;
    case 'R':
    case 'W':
        draw_buffer(step, kind == 'W', 0, &first, &second);
        push(step, first);
        push(step, second);
        return;
    case 'V':
    case 'v': draw_vector(step, kind == 'v'); return;
    case 'i': push(step, draw_offset()); break;
    case '-': push(step, is_one_in(5) ? -1 : draw_offset()); break;
    case 'z': push(step, 0); break;
    case 'l': push(step, (long)draw_copied()); break;
    case 's': push(step, (long)draw_length()); break;
    case 'w': push(step, PICK(whences)); break;
    case 'F': push(step, FLAGS(step, rwf)); return;
    case 'C': push(step, is_one_in(2) ? O_CLOEXEC : is_one_in(4) ? O_NONBLOCK : 0); break;
    case 'a': push(step, is_one_in(20) ? 8 + (long)draw_below(5) : (long)draw_below(8)); break;
    case 'A': push(step, FLAGS(step, stat_flags)); return;
    case 'E': push(step, FLAGS(step, access_flags)); return;
    case 'L': push(step, FLAGS(step, link_flags)); return;
    case 'U': push(step, FLAGS(step, unlink_flags)); return;
    case 'Q': push(step, FLAGS(step, rename_flags)); return;
    case 'M': push(step, FLAGS(step, chmod_flags)); return;
    case 'u': push(step, PICK(owners)); break;
    case 'T': draw_times(step); return;
    case 'k':
        /* Files in memory know of no range that is made zero. */
        push(step, profile == PROFILE_HUGE ? draw_flags(step, fallocate_flags, 2) : FLAGS(step, fallocate_flags));
        return;
    case 'S': draw_status(step, 'S', sizeof(struct stat)); return;
    case 'P': draw_status(step, 'P', 256); return;
    case 'X':
        first = PICK(masks);
        say(step, "0x%lx, ", first);
        push(step, first);
        draw_status(step, 'X', 256);
        return;
    case 'n': draw_xattr_name(step); return;
    case 'x': draw_xattr_value(step); return;
    case 'y': draw_xattr_room(step, 'y'); return;
    case 'Y': draw_xattr_room(step, 'Y'); return;
    case 'e': push(step, FLAGS(step, xattr_flags)); return;
    case 'j': draw_moved_offset(step); return;
    case 'c': draw_fcntl(step); return;
    case 'I': draw_ioctl(step); return;
    case 'G': push(step, FLAGS(step, sync_flags)); return;
    case 'g': push(step, (long)draw_below(8)); break;
    case 'O': push(step, PICK(operations) | FLAGS(step, lock_flags) | LOCK_NB); say(step, "|"); break;
    case 'D': push(step, PICK(devices)); break;
    case 'K':
        /* Only the super-user may make devices, and these are the harmless ones. */
        push(step, PICK(kinds) | (draw_mode() & 07777));
        say(step, "0%lo", (unsigned long)step->arguments[step->arguments_used - 1]);
        return;
    case 'r': push(step, is_one_in(12) ? (long)(1 + draw_below(3)) : 0); break;
    case 'b': push(step, (long)PICK(((size_t[]){24, 32, 64, 100, 280, 4096, 32768, 0, 10}))); break;
    case 'H': draw_lock(step, F_OFD_SETLK, "F_OFD_SETLK"); return;
    case 'q': push(step, (long)draw_below(1 << 16)); break;
    default: stop_program("kind");
    }
    say(step, "%ld", step->arguments[step->arguments_used - 1]);
}

/* Draws a call and its arguments. */
void draw_arguments(struct step *step)
{
    const char *kind;
    room_used = 0;
    /* Calls before may have left other bytes there, and a write of more than there is takes all of it. */
    memset(buffer, 0x55, BUFFER_BYTES);
    step->arguments_used = step->outputs_used = 0;
    memset(step->arguments, 0, sizeof step->arguments);
    say(step, "%s(", step->call->name);
    for (kind = step->call->kinds; *kind != 0; kind++) {
        if (kind != step->call->kinds)
            say(step, ", ");
        draw_kind(step, *kind);
    }
    say(step, ")");
}
