/* patient MOUNT: opens a session, says so, and looks at a file as soon as its input ends. */
#include <ashlar.h>

#include <stdio.h>
#include <string.h>
#include <sys/stat.h>

int main(int argc, char **argv)
{
    char why[ASHLAR_MESSAGE_BYTES] = "";
    struct stat found;
    ashlar_fs *fs;
    int result;

    if (argc != 2)
        return 2;
    result = ashlar_open_fs(&fs, argv[1], 0, why, sizeof why);
    if (result < 0) {
        fprintf(stderr, "no session: %s\n", why);
        return 1;
    }
    puts("open");
    fflush(stdout);
    while (getchar() != EOF)
        ;
    result = ashlar_stat(fs, "a file that nobody has asked for", &found);
    if (result < 0)
        fprintf(stderr, "looking: %s\n", strerror(-result));
    return result < 0;
}
