# A repository with history: branches, a merge, packing, a clone, and git's own check.
git init -q -b main work
cd work
for commit in $(seq 1 40); do
  for file in $(seq 1 5); do
    mkdir -p "d$((file % 3))"
    printf 'commit %s file %s\n' "$commit" "$file" >>"d$((file % 3))/f$file"
  done
  git add -A
  git commit -q -m "commit $commit"
done
git checkout -q -b side HEAD~10
echo side >side.txt
git add side.txt
git commit -q -m side
git checkout -q main
git merge -q --no-edit side
git mv d0 moved
git commit -q -m 'a directory moved'
git gc -q --aggressive
git fsck --strict --no-progress
git rev-parse HEAD
git log --format='%H %s' | sha256sum
git status --porcelain
cd ..
git clone -q work copy
git -C copy fsck --no-progress
git -C copy rev-parse HEAD
rm -rf copy/moved
git -C copy status --porcelain
git -C copy checkout -q -- .
git -C copy status --porcelain
rm -rf work/.git/hooks
manifest work/moved
