# Packages that pip builds, installs, replaces and removes in a virtual environment, without a network.
export PIP_NO_INDEX=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_CACHE_DIR="$PWD/cache" PIP_NO_INPUT=1 PIP_ROOT_USER_ACTION=ignore
unset PYTHONDONTWRITEBYTECODE PIP_REQUIRE_VIRTUALENV PIP_CONFIG_FILE
python3 -m venv venv
cat >backend.py <<'FILE'
import os, zipfile

def build_wheel(directory, settings=None, metadata=None):
    version = open("VERSION").read().strip()
    name = f"thing-{version}-py3-none-any.whl"
    info = f"thing-{version}.dist-info"
    files = {f"thing/part{n}.py": f"VALUE = {n}\n" for n in range(100)}
    files["thing/__init__.py"] = f"def main():\n    print('thing {version}')\n"
    files[f"{info}/METADATA"] = f"Metadata-Version: 2.1\nName: thing\nVersion: {version}\n"
    files[f"{info}/WHEEL"] = "Wheel-Version: 1.0\nGenerator: backend\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    files[f"{info}/entry_points.txt"] = "[console_scripts]\nthing = thing:main\n"
    files[f"{info}/RECORD"] = "".join(f"{path},,\n" for path in [*files, f"{info}/RECORD"])
    with zipfile.ZipFile(os.path.join(directory, name), "w") as wheel:
        for path, text in files.items():
            wheel.writestr(path, text)
    return name
FILE
for version in 1.0 2.0; do
  mkdir "thing-$version"
  cp backend.py "thing-$version"
  echo "$version" >"thing-$version/VERSION"
  printf '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n' >"thing-$version/pyproject.toml"
  printf 'Metadata-Version: 2.1\nName: thing\nVersion: %s\n' "$version" >"thing-$version/PKG-INFO"
  tar -czf "thing-$version.tar.gz" "thing-$version"
  venv/bin/pip install -q "./thing-$version.tar.gz"
  venv/bin/thing
done
venv/bin/pip list --format=freeze | grep thing
mkdir wheels
venv/bin/pip wheel -q -w wheels ./thing-1.0.tar.gz
venv/bin/pip install -q --force-reinstall wheels/thing-1.0-py3-none-any.whl
venv/bin/thing
venv/bin/python -c 'import thing.part42; print(thing.part42.VALUE)'
find venv/lib -path '*thing*' -name '*.py' | wc -l
find venv/lib -path '*thing*' -name '*.pyc' | wc -l
venv/bin/pip uninstall -q -y thing
find venv -path '*thing*' | wc -l
ls
