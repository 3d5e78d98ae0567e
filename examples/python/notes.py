#!/usr/bin/env python3
"""A notebook: one file a day, one line a note, kept on an Ashlar file system.

    notes.py /srv/files add "bought bread"     adds a note, persistently
    notes.py /srv/files show                   prints all days
    notes.py /srv/files find bread             prints the notes that hold a word

/srv/files is where an Ashlar is mounted ('ashlar mount /srv/files'). What is noted here shows there at once: cat /srv/files/notes/*
"""

import sys
import time

import ashlar

DIRECTORY = "notes"


def add(files, words):
    try:
        files.mkdir(DIRECTORY, 0o755)
    except FileExistsError:
        pass
    path = time.strftime(f"{DIRECTORY}/%Y-%m-%d")
    line = f"{time.strftime('%H:%M')} {' '.join(words)}\n"
    # One write to the end, so that notes of several programs never mix.
    with files.open(path, "ab") as file:
        file.write(line.encode())
        file.flush()
        file.raw.fsync()
    size = files.stat(path).size
    print(f"noted in {path}, which has {size} bytes now")


def show(files, word=""):
    count = 0
    for day in sorted(files.listdir(DIRECTORY)):
        with files.open(f"{DIRECTORY}/{day}") as file:
            for line in file:
                if word in line:
                    count += 1
                    print(f"{day} {line}", end="")
    print(f"{count} note{'' if count == 1 else 's'}")


def main(arguments):
    match arguments:
        case [place, "add", *words] if words:
            action = lambda files: add(files, words)
        case [place, "show"]:
            action = show
        case [place, "find", word]:
            action = lambda files: show(files, word)
        case _:
            sys.exit(__doc__)
    try:
        with ashlar.FileSystem(place) as files:
            action(files)
    except OSError as error:
        sys.exit(f"notes: {error.filename + ': ' if error.filename else ''}{error.strerror}")


main(sys.argv[1:])
