# A C project: generated sources, a parallel build, a run of the result, and builds that have nothing to do.
mkdir source && cd source
{
  echo '#ifndef ALL_H'
  echo '#define ALL_H'
  for n in $(seq 1 24); do echo "long f$n(long x);"; done
  echo '#endif'
} >all.h
for n in $(seq 1 24); do
  printf '#include "all.h"\nlong f%s(long x) { return x * %s + 1; }\n' "$n" "$n" >"f$n.c"
done
{
  echo '#include "all.h"'
  echo '#include <stdio.h>'
  echo 'int main(void) { long x = 1;'
  for n in $(seq 1 24); do echo "x = f$n(x) % 1000003;"; done
  echo 'printf("%ld\n", x); return 0; }'
} >main.c
cat >Makefile <<'END'
objects := $(patsubst %.c,%.o,$(wildcard *.c))
program: libf.a main.o
	$(CC) -o $@ main.o -L. -lf
libf.a: $(filter-out main.o,$(objects))
	$(AR) rcsD $@ $^
%.o: %.c all.h
	$(CC) -O1 -c -o $@ $<
END
make -s -j4
./program
make -q && echo 'nothing to do'
touch -d '+2 seconds' f3.c
make -q || echo 'something to do'
make -s -j4
./program
cp program renamed && ./renamed
ls *.o | wc -l
sha256sum *.o | sort | sha256sum
