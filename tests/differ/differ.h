/* differ.h: random system calls whose answers are compared between places. See main.c. */
#ifndef DIFFER_H
#define DIFFER_H

#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

/* ---- draw.c: numbers, and the arguments of a step ---- */

enum {
    ARGUMENTS_MAX = 6,
    OUTPUTS_MAX = 6,
    /* Bytes of the buffer that calls read and write; behind it lies a page that may not be touched. */
    BUFFER_BYTES = 256 * 1024,
    /* The first descriptor that calls may name: those below are the program's own. */
    FIRST_DESCRIPTOR = 3,
    TEXT_BYTES = 16 * 1024
};

/* Which calls and values a sequence draws. */
enum profile {
    /* All system calls, with values that ext4 can have. */
    PROFILE_KERNEL,
    /* Data calls with offsets beyond ext4's 16 TiB: the reference is a file system without that limit. */
    PROFILE_HUGE,
    /* Calls that ashlar.h has. */
    PROFILE_CAPI
};

/* Memory that a call fills: printed after it. */
struct output {
    char kind;
    const void *at;
    size_t bytes;
};

struct step {
    const struct call *call;
    long arguments[ARGUMENTS_MAX];
    int arguments_used;
    struct output outputs[OUTPUTS_MAX];
    int outputs_used;
    /* The call and its arguments as a reader sees them. */
    char text[TEXT_BYTES];
    size_t text_used;
};

/* A call: its arguments by kind, and how often it is drawn. */
struct call {
    const char *name;
    const char *kinds;
    int weight;
    /* The kernel's number, or a function where one call is more than that. */
    long number;
    long (*kernel)(struct step *step);
    /* The function of libashlar; null if it has none. */
    long (*library)(const long *arguments);
};

extern enum profile profile;
/* The directory in which all happens. Its length is the same in every place. */
extern const char *place;

void seed_draws(uint64_t sequence, uint64_t step);
uint64_t draw_below(uint64_t bound);
int is_one_in(uint64_t many);
void map_buffers(void);
void draw_arguments(struct step *step);
void say(struct step *step, const char *format, ...) __attribute__((format(printf, 2, 3)));
/* Appends text in which the place's name is written as "@". */
void say_place(struct step *step, const char *text, size_t bytes);
uint64_t hash_bytes(uint64_t hash, const void *bytes, size_t count);

/* ---- calls.c: the calls ---- */

extern const struct call calls[];
extern const size_t calls_count;
/* Makes the call; returns its result, or a negative errno. */
long make_call(struct step *step);
extern int has_reserved;
int is_cut_short(const struct step *step, long result);
/* Why the answers of this call can't be compared in this state; null if they can. */
const char *find_exception(const struct step *step);

/* ---- world.c: the tree in which calls are made ---- */

void build_world(void);
void print_world(void);
void remove_world(void);
void say_stat(struct step *step, const void *stat);
void say_statx(struct step *step, const void *statx, unsigned int mask);
const char *name_of_time(long seconds, long nanoseconds);
void print_text(const char *format, ...) __attribute__((format(printf, 1, 2)));
void stop_program(const char *what);

/* ---- library.c: libashlar, in a program that links it ---- */

#ifdef WITH_LIBRARY
void open_library(const char *mount_point);
void reset_library(void);
#endif

#endif
