# Comes before each job: the same environment on every file system. A job runs in an empty directory of the file system
# under test; its output must be the same on all of them.
# The directory of rustup's compilers, which is not below the home that a job has.
[ ! -d "${RUSTUP_HOME:=${HOME:-}/.rustup}" ] || export RUSTUP_HOME
export LC_ALL=C TZ=UTC HOME="$PWD" PYTHONDONTWRITEBYTECODE=1
export GIT_CONFIG_NOSYSTEM=1 GIT_AUTHOR_NAME=A GIT_AUTHOR_EMAIL=a@example.org GIT_COMMITTER_NAME=A
export GIT_COMMITTER_EMAIL=a@example.org GIT_AUTHOR_DATE='1700000000 +0000' GIT_COMMITTER_DATE='1700000000 +0000'
unset GIT_DIR GIT_WORK_TREE GIT_INDEX_FILE
umask 022

# Every name below a directory with everything that programs can see of it and that does not differ between file
# systems.
manifest() {
  (cd "$1" && find . -type d -printf '%p d %m %u %g\n' -o -type l -printf '%p l %l\n' \
    -o -type f -printf '%p f %m %u %g %s %n\n' -o -printf '%p %y %m %u %g %n\n' | sort)
  (cd "$1" && find . -type f -print0 | sort -z | xargs -0 -r sha256sum)
}
