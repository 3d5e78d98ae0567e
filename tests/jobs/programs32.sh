# 32-bit programs without large-file support: they see all entries, and return to the positions that they remember.
cat >narrow.c <<'EOF'
#include <dirent.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
static int count(DIR *directory) {
	int entries = 0;
	errno = 0;
	while (readdir(directory)) entries++;
	printf("%d more: %s\n", entries, strerror(errno));
	return entries;
}
int main(int number, char **words) {
	DIR *directory = opendir(words[1]);
	int all = count(directory), seen = 0;
	char name[300], path[600];
	rewinddir(directory);
	for (; seen < all / 2; seen++) readdir(directory);
	long place = telldir(directory);
	struct dirent *next = readdir(directory);
	strcpy(name, next->d_name);
	printf("%d behind\n", all - seen - 1 - count(directory));
	/* The place stays where it was, whatever comes and goes. */
	for (int made = 0; made < 50; made++) {
		snprintf(path, sizeof path, "%s/new%d", words[1], made);
		fclose(fopen(path, "w"));
		unlink(path);
	}
	seekdir(directory, place);
	next = readdir(directory);
	printf("%s\n", next && !strcmp(next->d_name, name) ? "the same entry" : "another entry");
	rewinddir(directory);
	while ((next = readdir(directory))) {
		snprintf(path, sizeof path, "%s/%s", words[1], next->d_name);
		if (next->d_name[0] != '.' && unlink(path)) perror(path);
	}
	closedir(directory);
	printf("removed: %s\n", rmdir(words[1]) ? strerror(errno) : "yes");
	return 0;
}
EOF
gcc -m32 -w -o narrow narrow.c
mkdir few many
touch few/{one,two,three}
(cd many && seq 3000 | xargs touch)
# A process that has listed it before does not influence it.
ls -f many | wc -l
./narrow few
./narrow many
rm narrow
