/* patient MOUNT: opens a session, prints a line, and creates a directory when its input ends. Creating a name takes a
   request. An existing name may need none, if another process has looked it up. */
#include <ashlar.h>

#include <stdio.h>
#include <string.h>

int main(int argc, char **argv)
{
    char why[ASHLAR_MESSAGE_BYTES] = "";
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
    result = ashlar_mkdir(fs, "a directory", 0755);
    if (result < 0)
        fprintf(stderr, "making a directory: %s\n", strerror(-result));
    return result < 0;
}
