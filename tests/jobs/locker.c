/* Locks files by the orders on its standard input, line by line, and answers each line with one. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

extern char **environ;
static volatile int alarms;

static void on_alarm(int signal) {
  (void)signal;
  alarms++;
}

/* Byte by byte, so that the program that this one becomes finds the rest. */
static int line(char *into, int most) {
  int length = 0;
  while (length < most - 1 && read(0, into + length, 1) == 1) {
    if (into[length] == '\n') {
      into[length] = 0;
      return 1;
    }
    length++;
  }
  return 0;
}

static const char *name(int number) {
  static char other[16];
  switch (number) {
  case 0: return "done";
  case EACCES:
  case EAGAIN: return "EAGAIN";
  case EBADF: return "EBADF";
  case EDEADLK: return "EDEADLK";
  case EFAULT: return "EFAULT";
  case EINTR: return "EINTR";
  case EINVAL: return "EINVAL";
  case EIO: return "EIO";
  case EOVERFLOW: return "EOVERFLOW";
  }
  snprintf(other, sizeof other, "errno%d", number);
  return other;
}

static struct flock wanted(const char *type, const char *from, long start, long length) {
  struct flock lock = {0};
  lock.l_type = *type == 'r' ? F_RDLCK : *type == 'w' ? F_WRLCK : *type == 'u' ? F_UNLCK : 77;
  lock.l_whence = *from == 's' ? SEEK_SET : *from == 'c' ? SEEK_CUR : *from == 'e' ? SEEK_END : 9;
  lock.l_start = start;
  lock.l_len = length;
  return lock;
}

static int control(int file, int command, struct flock *lock) {
  return fcntl(file, command, lock) == 0 ? 0 : errno;
}

/* One lock that a thread waits for. */
static struct later {
  pthread_t thread;
  int file;
  struct flock lock;
} later;

static void *wait_later(void *nothing) {
  (void)nothing;
  return (void *)(long)control(later.file, F_SETLKW, &later.lock);
}

int main(int count, char **arguments) {
  char text[4096];
  setvbuf(stdout, NULL, _IOLBF, 0);
  printf("ready %d\n", count);
  while (line(text, sizeof text)) {
    char verb[16] = "", word[1024] = "", from[16] = "s";
    long a = 0, b = 0, c = 0;
    sscanf(text, "%15s", verb);
    if (strcmp(verb, "open") == 0) {
      /* open FLAGS NAME */
      char flags[16];
      sscanf(text, "%*s %15s %1023s", flags, word);
      int how = strchr(flags, 'b') ? O_RDWR : strchr(flags, 'w') ? O_WRONLY : O_RDONLY;
      how |= (strchr(flags, 'c') ? O_CREAT : 0) | (strchr(flags, 'x') ? O_CLOEXEC : 0);
      how |= strchr(flags, 'p') ? O_PATH : 0;
      int file = open(word, how, 0644);
      printf("%d\n", file);
    } else if (strcmp(verb, "set") == 0 || strcmp(verb, "wait") == 0 || strcmp(verb, "get") == 0 || strcmp(verb, "child") == 0 ||
               strcmp(verb, "later") == 0) {
      /* set FILE TYPE FROM START LENGTH */
      sscanf(text, "%*s %ld %15s %15s %ld %ld", &a, word, from, &b, &c);
      struct flock lock = wanted(word, from, b, c);
      if (*verb == 'l') {
        later.file = a;
        later.lock = lock;
        printf("%s\n", name(pthread_create(&later.thread, NULL, wait_later, NULL)));
      } else if (*verb == 's') {
        printf("%s\n", name(control(a, F_SETLK, &lock)));
      } else if (*verb == 'w') {
        printf("%s\n", name(control(a, F_SETLKW, &lock)));
      } else if (*verb == 'c') {
        int child = fork(), status = 0;
        if (child == 0)
          _exit(control(a, F_SETLK, &lock));
        waitpid(child, &status, 0);
        printf("%s\n", name(WEXITSTATUS(status)));
      } else {
        int error = control(a, F_GETLK, &lock);
        if (error)
          printf("%s\n", name(error));
        else if (lock.l_type == F_UNLCK)
          printf("free\n");
        else
          printf("%c %ld %ld %d\n", lock.l_type == F_RDLCK ? 'r' : 'w', (long)lock.l_start, (long)lock.l_len, lock.l_pid);
      }
    } else if (strcmp(verb, "close") == 0) {
      sscanf(text, "%*s %ld", &a);
      printf("%s\n", name(close(a) ? errno : 0));
    } else if (strcmp(verb, "dup") == 0) {
      sscanf(text, "%*s %ld", &a);
      printf("%d\n", dup(a));
    } else if (strcmp(verb, "over") == 0) {
      sscanf(text, "%*s %ld %ld", &a, &b);
      printf("%d\n", dup2(a, b));
    } else if (strcmp(verb, "seek") == 0) {
      sscanf(text, "%*s %ld %ld", &a, &b);
      printf("%ld\n", (long)lseek(a, b, SEEK_SET));
    } else if (strcmp(verb, "size") == 0) {
      sscanf(text, "%*s %ld %ld", &a, &b);
      printf("%s\n", name(ftruncate(a, b) ? errno : 0));
    } else if (strcmp(verb, "map") == 0) {
      /* A shared mapping hands the open file over to the kernel. */
      sscanf(text, "%*s %ld", &a);
      printf("%s\n", mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, a, 0) == MAP_FAILED ? name(errno) : "done");
    } else if (strcmp(verb, "spawn") == 0) {
      char *command[] = {"true", NULL};
      pid_t child;
      int error = posix_spawnp(&child, "true", NULL, NULL, command, environ);
      if (!error)
        waitpid(child, NULL, 0);
      printf("%s\n", name(error));
    } else if (strcmp(verb, "alarm") == 0) {
      /* alarm MILLISECONDS RESTARTS */
      sscanf(text, "%*s %ld %ld", &a, &b);
      struct sigaction action = {0};
      action.sa_handler = on_alarm;
      action.sa_flags = b ? SA_RESTART : 0;
      sigaction(SIGALRM, &action, NULL);
      struct itimerval timer = {{0, 0}, {a / 1000, a % 1000 * 1000}};
      setitimer(ITIMER_REAL, &timer, NULL);
      printf("done\n");
    } else if (strcmp(verb, "alarms") == 0) {
      printf("%d\n", alarms);
    } else if (strcmp(verb, "many") == 0) {
      /* many FILE COUNT: so many ranges with gaps between them */
      sscanf(text, "%*s %ld %ld", &a, &b);
      int error = 0;
      for (long at = 0; at < b && !error; at++) {
        struct flock lock = wanted("w", "s", at * 10, 5);
        error = control(a, F_SETLK, &lock);
      }
      printf("%s\n", name(error));
    } else if (strcmp(verb, "time") == 0) {
      /* time FILE COUNT: nanoseconds for a lock or an unlock */
      sscanf(text, "%*s %ld %ld", &a, &b);
      struct timespec begin, end;
      int error = 0;
      clock_gettime(CLOCK_MONOTONIC, &begin);
      for (long step = 0; step < b && !error; step++) {
        struct flock lock = wanted(step % 2 ? "u" : "w", "s", 100, 10);
        error = control(a, F_SETLK, &lock);
      }
      clock_gettime(CLOCK_MONOTONIC, &end);
      long passed = (end.tv_sec - begin.tv_sec) * 1000000000L + end.tv_nsec - begin.tv_nsec;
      if (error)
        printf("%s\n", name(error));
      else
        printf("%ld\n", passed / b);
    } else if (strcmp(verb, "add") == 0) {
      /* add FILE COUNT: a counter in the file, which only the holder of the lock changes */
      sscanf(text, "%*s %ld %ld", &a, &b);
      int error = 0;
      for (long step = 0; step < b && !error; step++) {
        struct flock lock = wanted("w", "s", 0, 0);
        error = control(a, F_SETLKW, &lock);
        long value = 0;
        if (!error && pread(a, &value, sizeof value, 0) < 0)
          error = errno;
        value++;
        if (!error && pwrite(a, &value, sizeof value, 0) < 0)
          error = errno;
        lock = wanted("u", "s", 0, 0);
        if (!error)
          error = control(a, F_SETLK, &lock);
      }
      printf("%s\n", name(error));
    } else if (strcmp(verb, "exec") == 0) {
      char *again[] = {arguments[0], "again", NULL};
      execv(arguments[0], again);
      printf("%s\n", name(errno));
    } else if (strcmp(verb, "noexec") == 0) {
      char *nothing[] = {"/nowhere", NULL};
      execv(nothing[0], nothing);
      printf("%s\n", name(errno == ENOENT ? 0 : errno));
    } else if (strcmp(verb, "joined") == 0) {
      /* joined MILLISECONDS: the result of a thread's wait for a lock */
      sscanf(text, "%*s %ld", &a);
      struct timespec until;
      void *error;
      clock_gettime(CLOCK_REALTIME, &until);
      until.tv_sec += a / 1000;
      printf("%s\n", pthread_timedjoin_np(later.thread, &error, &until) ? "waits" : name((int)(long)error));
    } else if (strcmp(verb, "pid") == 0) {
      printf("%d\n", getpid());
    } else if (strcmp(verb, "exit") == 0) {
      _exit(0);
    } else {
      printf("what?\n");
    }
  }
  return 0;
}
