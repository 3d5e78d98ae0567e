/* differ: makes random calls in a directory, and prints their results.
 *
 *     differ PROFILE PLACE FIRST SEQUENCES STEPS [OPTION=VALUE...]
 *
 * PROFILE is kernel, huge or capi; PLACE a directory with a name as long as in all other places. A sequence of STEPS
 * calls is named by its number, and so are those that follow, up to SEQUENCES of them. Each begins with a new tree in
 * PLACE/world, and ends with all that can be seen of it. The output must be the same in all places.
 *
 * only=1,5,7  makes only these steps of each sequence
 * each=1      prints the tree after each call
 * plant=1     says EEXIST where rmdir says ENOTEMPTY: a fault that comparing must find
 * mount=DIR   (with libashlar) where the file system is mounted
 */
#define _GNU_SOURCE
#include "differ.h"

#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

void say_result(struct step *step, long result);

static const char *only;
static int prints_each, plants;

static long weight_of(const struct call *call)
{
    static const char *const data[] = {"open",     "read",    "pread64", "readv",    "preadv",    "write",   "pwrite64", "writev",          "pwritev",
                                       "preadv2",  "pwritev2", "lseek",  "truncate", "ftruncate", "fallocate", "fstat",  "copy_file_range", "close",
                                       "dup",      "fcntl",   "sync_file_range", "fadvise64", "readahead", NULL};
    int at;
    if (profile == PROFILE_CAPI)
        return call->library == NULL ? 0 : call->weight > 0 ? call->weight : 8;
    if (profile == PROFILE_HUGE) {
        for (at = 0; data[at] != NULL; at++)
            if (strcmp(data[at], call->name) == 0)
                return call->weight;
        return 0;
    }
    return call->weight;
}

static const struct call *draw_call(long step)
{
    long sum = 0, drawn;
    size_t at;
    /* A sequence begins with files that are open. */
    if (step < 4)
        return profile == PROFILE_KERNEL ? &calls[step % 2] : &calls[0];
    for (at = 0; at < calls_count; at++)
        sum += weight_of(&calls[at]);
    drawn = (long)draw_below((uint64_t)sum);
    for (at = 0; drawn >= weight_of(&calls[at]); at++)
        drawn -= weight_of(&calls[at]);
    return &calls[at];
}

static int is_wanted(long step)
{
    const char *at = only;
    if (at == NULL)
        return 1;
    while (*at != 0) {
        char *end;
        if (strtol(at, &end, 10) == step)
            return 1;
        at = *end == ',' ? end + 1 : end;
    }
    return 0;
}

static void make_step(uint64_t sequence, long number)
{
    static struct step step;
    const char *exception;
    long result;
    seed_draws(sequence, (uint64_t)number);
    step.text_used = 0;
    step.call = draw_call(number);
    draw_arguments(&step);
    print_text("%lu.%ld %s", sequence, number, step.text);
    step.text_used = 0;
    step.text[0] = 0;
    exception = find_exception(&step);
    if (exception != NULL) {
        print_text(" left out: %s\n", exception);
        return;
    }
#ifdef WITH_LIBRARY
    step.arguments[ARGUMENTS_MAX - 1] = strcmp(step.call->name, "list") == 0 ? (long)&step : step.arguments[ARGUMENTS_MAX - 1];
#endif
    result = make_call(&step);
    if (plants && result == -ENOTEMPTY && strcmp(step.call->name, "rmdir") == 0)
        result = -EEXIST;
    has_reserved |= result == 0 && strcmp(step.call->name, "fallocate") == 0;
    has_reserved |= is_cut_short(&step, result);
    say_result(&step, result);
    print_text("%s\n", step.text);
}

int main(int argc, char **argv)
{
    uint64_t first, count, sequence;
    long steps, step;
    int at;
    if (argc < 6) {
        fprintf(stderr, "usage: differ PROFILE PLACE FIRST SEQUENCES STEPS [OPTION=VALUE...]\n");
        return 2;
    }
    profile = strcmp(argv[1], "capi") == 0 ? PROFILE_CAPI : strcmp(argv[1], "huge") == 0 ? PROFILE_HUGE : PROFILE_KERNEL;
    place = argv[2];
    first = strtoull(argv[3], NULL, 10);
    count = strtoull(argv[4], NULL, 10);
    steps = strtol(argv[5], NULL, 10);
    umask(022);
    signal(SIGIO, SIG_IGN);
    signal(SIGPIPE, SIG_IGN);
    /* Inherited descriptors differ from place to place. */
    syscall(SYS_close_range, FIRST_DESCRIPTOR, 900, 0);
    map_buffers();
    for (at = 6; at < argc; at++) {
        if (strncmp(argv[at], "only=", 5) == 0)
            only = argv[at] + 5;
        else if (strcmp(argv[at], "each=1") == 0)
            prints_each = 1;
        else if (strcmp(argv[at], "plant=1") == 0)
            plants = 1;
#ifdef WITH_LIBRARY
        else if (strncmp(argv[at], "mount=", 6) == 0)
            open_library(argv[at] + 6);
#endif
        else
            stop_program(argv[at]);
    }
    for (sequence = first; sequence < first + count; sequence++) {
        build_world();
        has_reserved = 0;
        for (step = 0; step < steps; step++)
            if (is_wanted(step)) {
                make_step(sequence, step);
                if (prints_each)
                    print_world();
            }
        print_world();
#ifdef WITH_LIBRARY
        reset_library();
#endif
        remove_world();
    }
    return 0;
}
