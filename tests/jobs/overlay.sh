# An overlay whose upper layer is here: names that are removed or moved away from the lower layer are gone, and stay so.
lay() {
  mount -t overlay overlay -o lowerdir=lower,upperdir=upper,workdir=work,redirect_dir=on,index=off,metacopy=off,xino=off merged
}
mkdir -p lower/dir/deep lower/tree/of upper work merged
for name in kept removed moved replaced changed dir/one dir/two dir/deep/three tree/of/old; do echo "$name" >"lower/$name"; done
lay
trap 'umount --lazy merged' EXIT
cd merged
rm removed
mv moved elsewhere
mv kept replaced
mkdir made
mv dir/one made/one
rm -r tree
mkdir tree
echo new >tree/new
mv dir directory
echo more >>changed
echo again >removed
rm removed
ln changed linked
mv elsewhere directory/deep/
mv made/one directory
python3 - <<'END'
import os
for name in ("removed", "moved", "kept", "dir", "directory/two", "tree/of"):
    try:
        print(name, os.stat(name).st_nlink)
    except OSError as error:
        print(name, error.strerror)
for number in range(50):
    open(f"{number}", "w").close()
    os.rename(f"{number}", "changed" if number % 2 else "linked")
    os.mkdir(f"directory/{number}")
    os.rename(f"directory/{number}", f"tree/{number}")
END
rm -r tree/3* directory/deep/three
cd ..
manifest merged
umount merged
echo "the upper layer:"
(cd upper && find . -printf '%p %y %m %U %G %n\n' | sort)
echo "the lower layer:"
manifest lower
lay
echo "laid again:"
manifest merged
umount merged
trap - EXIT
