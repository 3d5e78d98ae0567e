# Everything that archives keep: links, modes, owners, times, attributes, ACLs, devices, holes.
mkdir tree && cd tree
mkdir -p a/b/c empty 'name with blanks' $'new\nline' sticky
chmod 1777 sticky
head -c 100000 /dev/zero | tr '\0' x >a/file
ln a/file a/b/hard
ln -s ../file a/b/soft
ln -s nowhere dangling
mkfifo fifo
mknod null c 1 3
mknod disk b 7 200
printf 'text' >'name with blanks/f'
printf 'q' >$'new\nline/\001'
chown 1234:4321 a/b/hard
chmod 4755 a/file
chown -h 77:88 dangling
truncate -s 3M sparse
printf 'end' | dd of=sparse bs=1 seek=2000000 conv=notrunc status=none
setfattr -n user.colour -v green a/file
setfattr -n user.empty -v '' a/b
setfattr -n trusted.secret -v 0x0001ff a/b/c
setfacl -m u:1234:rwx,g:4321:r a/b/c
setfacl -d -m u:1234:rx a/b
find . -print0 | xargs -0 touch -h -d '2020-01-01 00:00:00.5 UTC'
touch -d '2001-02-03 04:05:06.789012345 UTC' a/file a
touch -h -d '1969-12-31 23:59:58 UTC' dangling
touch -d '2150-01-01 00:00:00 UTC' fifo
cd ..
look() {
  manifest "$1"
  (cd "$1" && find . -print0 | sort -z | xargs -0 getfattr -h -d -m -)
  (cd "$1" && find . -not -type l -print0 | sort -z | xargs -0 getfacl)
  (cd "$1" && find . \( -type f -o -type p \) -printf '%p %T@\n' | sort)
}
look tree
rsync -aHAXS tree/ synced/
rsync -aHAXSnic --delete tree/ synced/
look synced >synced.look
look tree | diff - synced.look && echo 'rsync keeps all'
tar --xattrs --xattrs-include='*' --acls -S -cf tree.tar tree
mkdir out
tar --xattrs --xattrs-include='*' --acls -xpf tree.tar -C out
look out/tree | diff - <(look tree) && echo 'tar keeps all'
cp -a tree copied
look copied | diff - <(look tree) && echo 'cp keeps all'
cp --sparse=always tree/sparse again
cmp tree/sparse again && [ "$(stat -c %b again)" -le 64 ] && echo 'holes stay holes'
[ "$(stat -c %b tree/sparse)" -le 64 ] && echo 'a sparse file takes little'
rm -rf tree copied
[ ! -e tree ] && look out/tree | sha256sum
