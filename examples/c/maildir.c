/* A mail store as maildir(5) describes it: each message is a file, written to tmp, made persistent, and moved to new by
 * one rename. So a reader of new lists whole messages only, whatever dies meanwhile.
 *
 *     cc -o maildir maildir.c $(pkg-config --cflags --libs ashlar)
 *     ./maildir /srv/files deliver box <message     delivers a message
 *     ./maildir /srv/files list box                 lists those that are there
 *     ./maildir /srv/files read box NAME            prints one, and marks it as seen
 *
 * /srv/files is where an Ashlar is mounted ('ashlar mount /srv/files'). A message that is delivered here shows there at
 * once, and the other way round.
 */
#include <ashlar.h>

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

static ashlar_fs *fs;

/* Ends the program where a call has failed, and says which one. */
static long check(long result, const char *what, const char *path)
{
    if (result < 0) {
        fprintf(stderr, "maildir: %s %s: %s\n", what, path, ashlar_strerror((int)result));
        exit(1);
    }
    return result;
}

static void make_directory(const char *path)
{
    int result = ashlar_mkdir(fs, path, 0700);
    if (result != -EEXIST)
        check(result, "making", path);
}

static void deliver(const char *box)
{
    char tmp[512], target[512], buffer[65536];
    size_t count;
    long total = 0;
    struct timespec now;
    int file;

    snprintf(tmp, sizeof tmp, "%s/tmp", box);
    snprintf(target, sizeof target, "%s/new", box);
    make_directory(box);
    make_directory(tmp);
    make_directory(target);
    /* A name that no other process takes: the time, to the nanosecond, and the process. */
    clock_gettime(CLOCK_REALTIME, &now);
    snprintf(tmp, sizeof tmp, "%s/tmp/%ld.%09ld.%ld", box, (long)now.tv_sec, now.tv_nsec, (long)getpid());
    snprintf(target, sizeof target, "%s/new/%ld.%09ld.%ld", box, (long)now.tv_sec, now.tv_nsec, (long)getpid());

    file = (int)check(ashlar_open(fs, tmp, O_WRONLY | O_CREAT | O_EXCL, 0600), "making", tmp);
    while ((count = fread(buffer, 1, sizeof buffer, stdin)) > 0) {
        size_t done = 0;
        /* A write is short only where the file system has no room for more: the next one then says so. */
        while (done < count)
            done += (size_t)check(ashlar_write(fs, file, buffer + done, count - done), "writing", tmp);
        total += (long)count;
    }
    check(ashlar_fsync(fs, file), "syncing", tmp);
    check(ashlar_close(fs, file), "closing", tmp);
    check(ashlar_rename(fs, tmp, target, 0), "delivering", target);
    printf("delivered %s, %ld bytes\n", target, total);
}

static void list(const char *box)
{
    char path[1024], when[64];
    const char *const parts[] = {"new", "cur"};
    ashlar_dirent entry;
    ashlar_dir *dir;
    struct stat stat;
    int part, more, count = 0;

    for (part = 0; part < 2; part++) {
        snprintf(path, sizeof path, "%s/%s", box, parts[part]);
        more = ashlar_opendir(fs, path, &dir);
        if (more == -ENOENT)
            continue;
        check(more, "listing", path);
        while ((more = ashlar_readdir(dir, &entry)) > 0) {
            if (entry.d_name[0] == '.')
                continue;
            snprintf(path, sizeof path, "%s/%s/%s", box, parts[part], entry.d_name);
            check(ashlar_stat(fs, path, &stat), "looking at", path);
            strftime(when, sizeof when, "%Y-%m-%d %H:%M:%S", localtime(&stat.st_mtime));
            printf("%s  %s  %8ld bytes  %s\n", part == 0 ? "new " : "seen", when, (long)stat.st_size, entry.d_name);
            count++;
        }
        check(more, "listing", path);
        check(ashlar_closedir(dir), "listing", path);
    }
    printf("%d message%s in %s\n", count, count == 1 ? "" : "s", box);
}

static void read_message(const char *box, const char *name)
{
    char path[512], seen[512], buffer[65536];
    long count;
    int file;

    snprintf(path, sizeof path, "%s/new/%s", box, name);
    snprintf(seen, sizeof seen, "%s/cur", box);
    file = ashlar_open(fs, path, O_RDONLY, 0);
    if (file == -ENOENT) {
        snprintf(path, sizeof path, "%s/cur/%s", box, name);
        file = ashlar_open(fs, path, O_RDONLY, 0);
    }
    check(file, "opening", path);
    while ((count = check(ashlar_read(fs, file, buffer, sizeof buffer), "reading", path)) > 0)
        fwrite(buffer, 1, (size_t)count, stdout);
    check(ashlar_close(fs, file), "closing", path);
    make_directory(seen);
    snprintf(seen, sizeof seen, "%s/cur/%s", box, name);
    check(ashlar_rename(fs, path, seen, 0), "marking", path);
}

int main(int argc, char **argv)
{
    char message[ASHLAR_MESSAGE_BYTES];
    int result;

    if (argc < 4 || argc > 5) {
        fprintf(stderr, "usage: maildir MOUNT_POINT deliver|list BOX\n       maildir MOUNT_POINT read BOX NAME\n");
        return 2;
    }
    result = ashlar_open_fs(&fs, argv[1], 0, message, sizeof message);
    if (result < 0) {
        fprintf(stderr, "maildir: %s\n", message);
        return 1;
    }
    if (strcmp(argv[2], "deliver") == 0 && argc == 4)
        deliver(argv[3]);
    else if (strcmp(argv[2], "list") == 0 && argc == 4)
        list(argv[3]);
    else if (strcmp(argv[2], "read") == 0 && argc == 5)
        read_message(argv[3], argv[4]);
    else
        fprintf(stderr, "maildir: '%s' is nothing that it does\n", argv[2]);
    return ashlar_close_fs(fs) < 0;
}
