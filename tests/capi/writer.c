/* writer MOUNT DIRECTORY: appends numbered lines to DIRECTORY/journal until it is killed. For each number it also puts
 * a file in place by a rename. It prints each number when all calls for it have returned: a printed number must be
 * there.
 */
#include <ashlar.h>

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static void check(long result, const char *what)
{
    if (result < 0) {
        fprintf(stderr, "writer: %s: %s\n", what, ashlar_strerror((int)result));
        exit(1);
    }
}

int main(int argc, char **argv)
{
    char message[ASHLAR_MESSAGE_BYTES], line[64], path[512], target[512];
    ashlar_fs *fs;
    int journal, file, length;
    long number;

    if (argc != 3)
        return 2;
    if (ashlar_open_fs(&fs, argv[1], 0, message, sizeof message) < 0) {
        fprintf(stderr, "writer: %s\n", message);
        return 1;
    }
    snprintf(path, sizeof path, "%s/journal", argv[2]);
    journal = ashlar_open(fs, path, O_WRONLY | O_CREAT | O_APPEND, 0644);
    check(journal, "opening the journal");
    for (number = 0;; number++) {
        length = snprintf(line, sizeof line, "%ld\n", number);
        check(ashlar_write(fs, journal, line, (size_t)length), "appending");
        snprintf(path, sizeof path, "%s/tmp", argv[2]);
        snprintf(target, sizeof target, "%s/%ld", argv[2], number % 1000);
        file = ashlar_open(fs, path, O_WRONLY | O_CREAT | O_EXCL, 0644);
        check(file, "making a file");
        check(ashlar_write(fs, file, line, (size_t)length), "writing a file");
        check(ashlar_close(fs, file), "closing a file");
        check(ashlar_rename(fs, path, target, 0), "renaming");
        /* One call, so that a number is printed whole or not at all. */
        if (write(1, line, (size_t)length) != length)
            return 1;
    }
}
