#!/usr/bin/env python3
"""Words that the tree's style rules out (CONTRIBUTING.md, "Words"): pronouns in place of an actor, terms that the glossary
replaced, long lines in comments and Markdown, type names that are defined twice, long names of tests.

Prints each breach and fails if there is one. `words.py FILE…` shows the breaches of these files alone."""

import os
import re
import subprocess
import sys
from collections import defaultdict

WIDTH = 120
TEST_NAME_MAX = 60
PRONOUN = re.compile(r"\b(who|whoever|whom|somebody|anybody|nobody|everybody|he|his|him|himself)\b", re.IGNORECASE)
WHAT = re.compile(r"(?:^|[.!?:]\s+|^[-*]\s+)(What|Who)\b(?![^.!?]*\?)")
# A term that the glossary of docs/architecture.md replaced, and its successor.
REPLACED = {
    "board": "grant cache",
    "mailbox": "request slot",
    "era": "version (extent, segment or quota), or epoch (cluster)",
    "eras": "versions",
    "purse": "quota balance",
    "purses": "quota balances",
    "detour": "directory version",
    "parked": "recycled",
    "habits": "program profile",
    "offence": "violation",
    "judge": "validate",
    "judged": "validated",
    "seat": "worker",
    "told": "granted, or sent",
    "looked": "name what was looked for",
}
PHRASES = {
    "path alone": "O_PATH descriptor",
    "become the kernel's": "hand over to the kernel",
    "becomes the kernel's": "hand over to the kernel",
    "became the kernel's": "hand over to the kernel",
}
# These are terms only as names; in prose they are everyday words.
NAMES_ONLY = {"habits", "looked"}
# Words of other programs and of everyday speech that only look like a replaced term.
ALLOWED = re.compile(r"board of|Maildir|mailbox(es)? (of|in|for) mail|told apart")
# Names that more than one crate may define: the idiom of the language, or of the interface that the crate speaks.
SHARED_TYPES = {"Error", "Result", "Options", "Arguments"}
# A type that other files can name; one that its file keeps for itself may have a short name.
TYPE = re.compile(r"^\s*pub(?:\([a-z ]+\))? (?:unsafe )?(?:struct|enum|trait|union|type) ([A-Z][A-Za-z0-9]*)")
FUNCTION = re.compile(r"^\s*(?:pub(?:\([a-z ]+\))? )?(?:async )?fn ([a-z0-9_]+)")
NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
PART = re.compile(r"[A-Z]?[a-z0-9]+|[A-Z]+(?![a-z])")


def main():
    os.chdir(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    named = sys.argv[1:]
    files = [file for file in subprocess.check_output(["git", "ls-files"], text=True).split() if is_checked(file)]
    problems = breaches(files)
    found = [problem for file in named or files for problem in problems.get(file, [])]
    if not found:
        print(f"{len(named or files)} files keep to the style's words")
    return report(found)


def report(found):
    for problem in found:
        print(problem)
    return 1 if found else 0


def is_checked(file):
    if file == "scripts/words.py" or file.startswith("LICENSE"):
        return False
    return file.endswith((".rs", ".md", ".py", ".sh", ".c", ".h", ".toml")) or file == "Makefile"


def breaches(files):
    problems = defaultdict(list)
    types = defaultdict(list)
    for file in files:
        with open(file, encoding="utf-8", errors="replace") as source:
            check_file(file, source.read().split("\n"), problems[file], types)
    for name, places in types.items():
        if len(places) > 1 and name not in SHARED_TYPES:
            for file, number in places:
                others = ", ".join(f"{other}:{line}" for other, line in places if (other, line) != (file, number))
                problems[file].append(f"{file}:{number}: type {name} is defined again: {others}")
    return {file: found for file, found in problems.items() if found}


def check_file(file, lines, found, types):
    stem = os.path.splitext(os.path.basename(file))[0]
    for part in re.split(r"[_-]", stem):
        if part in REPLACED:
            found.append(f"{file}: the name says '{part}': say '{REPLACED[part]}'")
    is_test = False
    for number, line in enumerate(lines, 1):
        place = f"{file}:{number}"
        prose = prose_of(file, lines, number)
        if prose is not None:
            check_prose(place, prose, line, found)
        if file.endswith(".rs"):
            code = re.sub(r"//.*", "", line)
            if (match := TYPE.match(code)) and re.match(r"crates/\w+/src/(?!.*tests)", file):
                types[match[1]].append((file, number))
            if match := FUNCTION.match(code):
                if (is_test or "/suite/" in file) and len(match[1]) > TEST_NAME_MAX:
                    found.append(f"{place}: the test's name has {len(match[1])} characters, {TEST_NAME_MAX} at most")
                is_test = False
            elif re.search(r"#\[test\]", code):
                is_test = True
            for name in NAME.findall(re.sub(r'"(?:[^"\\]|\\.)*"', "", code)):
                check_name(place, name, found)


def check_prose(place, prose, line, found):
    if len(line) > WIDTH and "|" not in prose[:1] and "](http" not in line:
        found.append(f"{place}: {len(line)} columns, {WIDTH} at most")
    words = re.sub(r"`[^`]*`|\]\([^)]*\)", " ", prose)
    if ALLOWED.search(words):
        return
    if match := PRONOUN.search(words):
        found.append(f"{place}: '{match[1]}': name the actor")
    if match := WHAT.search(words.strip()):
        found.append(f"{place}: a sentence starts with '{match[1]}': name the thing")
    for word in re.findall(r"[a-z]+", words.lower()):
        if word in REPLACED and word not in NAMES_ONLY:
            found.append(f"{place}: '{word}': say '{REPLACED[word]}'")
    for phrase, better in PHRASES.items():
        if phrase in words:
            found.append(f"{place}: '{phrase}': say '{better}'")


def check_name(place, name, found):
    for part in PART.findall(name):
        if part.lower() in REPLACED:
            found.append(f"{place}: the name {name} says '{part.lower()}': say '{REPLACED[part.lower()]}'")


def prose_of(file, lines, number):
    """The line's prose: a comment's text, or a document's; None where there is none."""
    line = lines[number - 1]
    if file.endswith(".md"):
        return None if is_fenced(lines, number) else line
    if file.endswith((".rs", ".c", ".h")):
        match = re.search(r"(?:^|\s)//+[/!]?(.*)|^\s*/?\*+(?:\s(.*))?$", line)
        return (match[1] or match[2] or "") if match else None
    match = re.search(r"(?:^|\s)#(?!!)(.*)", line)
    return match[1] if match else None


def is_fenced(lines, number):
    return sum(line.lstrip().startswith("```") for line in lines[:number]) % 2 == 1 or lines[number - 1].lstrip().startswith("```")


if __name__ == "__main__":
    sys.exit(main())
