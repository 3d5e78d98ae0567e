"""Reads which source files of a Rust crate use which others, and which paths of other crates they name.

A file stands for the module that it holds, with its inline modules. A file uses another one if a path in it, of a `use`
or elsewhere, leads to an item of that file. A re-export leads to the item's own file. These don't count: `mod`, a
re-export of what stands below the module, comments, strings, and code under `#[cfg(test)]`. Nor do calls of methods: a
path has named their type before."""

import os
import re

TOKEN = re.compile(
    r"""(?P<space>\s+|//[^\n]*)
    |(?P<comment>/\*)
    |(?:br|cr|r)(?P<hashes>\#*)".*?"(?P=hashes)
    |[bc]?"(?:\\.|[^"\\])*"
    |b?'(?:\\[^\n]?[^'\n]*|[^'\\\n])'
    |(?P<lifetime>'\w+)
    |(?P<name>(?:r\#)?[^\W\d]\w*)
    |\d\w*(?:\.\d\w*)?
    |(?P<sign>::|=>|->|.)""",
    re.S | re.X,
)
COMMENT_MARK = re.compile(r"/\*|\*/")
LITERAL = '""'
OPENING, CLOSING = {"(", "[", "{"}, {")", "]", "}"}
# Words before the name of an item, and all words that begin an item or statement which may end in braces or `;`.
DEFINING = {"fn", "struct", "enum", "union", "trait", "type", "const", "static"}
ENDED_BY_SEMICOLON = {"use", "let", "static", "const", "type"}
KEYWORDS = DEFINING | ENDED_BY_SEMICOLON | {"mod", "impl", "extern", "macro_rules"}


class Module:
    """A module: its submodules, the items that it defines, and the names that it imports."""

    def __init__(self, path, file, parent=None):
        self.path, self.file, self.parent = path, file, parent
        self.children, self.items, self.imports, self.globs = {}, set(), {}, []

    def root(self):
        return self.parent.root() if self.parent else self

    def is_below(self, other):
        return self.path[: len(other.path)] == other.path


class Crate:
    """The modules of one target. `uses` has the files that each file uses; `outside`, (path, file, line)."""

    def __init__(self, root_file):
        self.uses, self.outside = {}, set()
        self.paths = []  # (module, path, line, the name that it re-exports)
        self.names = {}  # the names in a file, those of its `use` items and of methods aside
        root = Module([], root_file)
        self.read_file(root, os.path.dirname(root_file))
        for module, path, line, reexported in self.paths:
            self.follow(module, path, line, reexported)

    def read_file(self, module, directory):
        with open(module.file, encoding="utf-8") as source:
            tokens = list(tokens_of(source.read()))
        self.uses.setdefault(module.file, set())
        self.names.setdefault(module.file, set())
        if [token for token, _ in tokens[:7]] != ["#", "!", "[", "cfg", "(", "test", ")"]:
            self.read_items(module, tokens, directory)

    def read_items(self, module, tokens, directory):
        """Reads the tokens of a module, those within functions too."""
        at = 0
        while at + 1 < len(tokens):
            token, following = tokens[at][0], tokens[at + 1][0]
            if token == "#" and following == "[":
                end = end_of_group(tokens, at + 1)
                at = end_of_item(tokens, end) if is_test_only(tokens[at + 2 : end - 1]) else end
            elif token == "mod" and is_name(following):
                at = self.read_module(module, tokens, at, directory)
            elif token == "use" and following != "<":
                at = self.read_use(module, tokens, at)
            elif is_name(token):
                at = self.read_path(module, tokens, at)
            else:
                at += 1

    def read_module(self, module, tokens, at, directory):
        name, below = tokens[at + 1][0], os.path.join(directory, tokens[at + 1][0])
        if tokens[at + 2][0] == ";":
            file = below + ".rs" if os.path.exists(below + ".rs") else os.path.join(below, "mod.rs")
            module.children[name] = Module(module.path + [name], file, module)
            self.read_file(module.children[name], below)
            return at + 3
        end = end_of_group(tokens, at + 2)
        module.children[name] = Module(module.path + [name], module.file, module)
        self.read_items(module.children[name], tokens[at + 3 : end - 1], below)
        return end

    def read_use(self, module, tokens, at):
        end = at
        while tokens[end][0] != ";":
            end += 1
        is_reexport = is_public(tokens, at)
        for path, name in leaves([token for token, _ in tokens[at + 1 : end]]):
            if path[-1] == "*":
                module.globs.append(path[:-1])
            elif name != "_":
                module.imports.setdefault(name, []).append(path)
            self.paths.append((module, path, tokens[at][1], name if is_reexport else None))
        return end + 1

    def read_path(self, module, tokens, at):
        first, line = tokens[at]
        before = tokens[at - 1][0] if at else ""
        path = [first.removeprefix("r#")]
        if before in DEFINING or (before == "!" and at > 1 and tokens[at - 2][0] == "macro_rules"):
            module.items.add(path[0])
        if before != ".":
            self.names[module.file].add(path[0])
        at += 1
        while at + 1 < len(tokens) and tokens[at][0] == "::" and is_name(tokens[at + 1][0]):
            path.append(tokens[at + 1][0].removeprefix("r#"))
            at += 2
        if len(path) > 1 and before != ".":
            self.paths.append((module, path, line, None))
        return at

    def follow(self, module, path, line, reexported):
        """Notes where a path leads: to files of this crate, or to another one."""
        found, outside = resolve(module, path)
        self.outside |= {(path, module.file, line) for path in outside}
        if path[-1] == "*":
            for name in self.names[module.file]:
                found = found | {(target, True) for target, is_sure in resolve(module, path[:-1] + [name])[0] if is_sure}
        for target, _ in found:
            is_own = reexported and (reexported == "*" or reexported not in self.names[module.file])
            if target.file != module.file and not (is_own and target.is_below(module)):
                self.uses[module.file].add(target.file)


def resolve(module, path, seen=frozenset(), is_first=True):
    """Where a path ends: modules, each with whether its item was found there; and paths of other crates.

    A path's last name may be a module and a function at once, so there may be several."""
    head, rest = path[0], path[1:]
    starts = {"crate": module.root(), "self": module, "super": module.parent}
    if is_first and head in starts:
        start = starts[head]
        return resolve(start, rest, seen, rest[0] == "super") if rest else ({(start, True)}, set())
    if head == "*":
        return {(module, True)}, set()
    child = module.children.get(head)
    if child and rest:
        return resolve(child, rest, seen, False)
    ways = [({(child, True)}, set())] if child else []
    # `use name::name` has its first name from elsewhere, and so has a glob.
    if (module, head) not in seen:
        for target in module.imports.get(head, []):
            ways.append(resolve(module, target + rest, seen | {(module, head)}))
    if head in module.items:
        ways.append(({(module, True)}, set()))
    if not ways and (module, "*", head) not in seen:
        for glob in module.globs:
            there, _ = resolve(module, glob + path, seen | {(module, "*", head)})
            there = {(target, True) for target, is_sure in there if is_sure}
            ways += [(there, set())] if there else []
    if ways:
        return set().union(*(found for found, _ in ways)), set().union(*(outside for _, outside in ways))
    # A macro may have made the item; and what no module knows is another crate's.
    return (set(), {"::".join(path)}) if is_first else ({(module, False)}, set())


def tokens_of(text):
    """The names and signs of a source text, each with its line; a literal is a pair of quotes."""
    at, line = 0, 1
    while at < len(text):
        match = TOKEN.match(text, at)
        end = match.end()
        if match["comment"]:
            depth = 1
            while depth:
                mark = COMMENT_MARK.search(text, end)
                depth += 1 if mark.group() == "/*" else -1
                end = mark.end()
        elif not match["space"] and not match["lifetime"]:
            yield match["name"] or match["sign"] or LITERAL, line
        line += text.count("\n", at, end)
        at = end


def is_name(token):
    return token.startswith("r#") or token[0] == "_" or token[0].isalpha()


def end_of_group(tokens, at):
    """The place after the bracket that closes the one here."""
    depth = 0
    while at < len(tokens):
        depth += (tokens[at][0] in OPENING) - (tokens[at][0] in CLOSING)
        at += 1
        if depth == 0:
            break
    return at


def is_test_only(attribute):
    """Whether an attribute's tokens say that its item exists in tests alone."""
    words = [token for token, _ in attribute]
    if words == ["cfg", "(", "test", ")"]:
        return True
    return words[:4] == ["cfg", "(", "all", "("] and "test" in words and not {"any", "not"} & set(words)


def end_of_item(tokens, at):
    """The place after the item, statement, field or arm that begins here, with its other attributes."""
    while tokens[at][0] == "#":
        at = end_of_group(tokens, at + 1)
    keyword = ""
    while at < len(tokens) and tokens[at][0] not in CLOSING:
        token = tokens[at][0]
        if token in OPENING:
            at = end_of_group(tokens, at)
            if token == "{" and keyword not in ENDED_BY_SEMICOLON:
                return at
            continue
        if token in KEYWORDS and keyword in {"", "const", "extern"}:
            keyword = token
        at += 1
        if token == ";" or (token == "," and not keyword):
            return at
    return at


def is_public(tokens, at):
    """Whether `pub`, or `pub(…)`, stands before this place."""
    at -= 1
    if at >= 0 and tokens[at][0] == ")":
        while tokens[at][0] != "(":
            at -= 1
        at -= 1
    return at >= 0 and tokens[at][0] == "pub"


def leaves(tokens):
    """The paths that the tokens of a `use` name, each with the name that it gets."""

    def branch(at, prefix):
        path, name = list(prefix), None
        while at < len(tokens) and tokens[at] not in {",", "}"}:
            if tokens[at] == "{":
                at += 1
                while tokens[at] != "}":
                    at = yield from branch(at, path)
                    at += tokens[at] == ","
                return at + 1
            if tokens[at] == "as":
                name, at = tokens[at + 1], at + 1
            elif tokens[at] != "::":
                path.append(tokens[at].removeprefix("r#"))
            at += 1
        if path[-1] == "self" and len(path) > 1:
            path.pop()
        yield path, name or path[-1]
        return at

    yield from branch(0, [])


def cycles(uses):
    """The greatest sets of files that all reach each other."""
    reached = {file: reach(uses, file) for file in uses}
    found = []
    for file in sorted(uses):
        if not any(file in cycle for cycle in found):
            cycle = {other for other in reached[file] if file in reached[other]}
            found += [cycle] if cycle else []
    return found


def reach(uses, start):
    found, waiting = set(), [start]
    while waiting:
        new = uses[waiting.pop()] - found
        found |= new
        waiting += new
    return found


def chains(uses, cycle):
    """Short chains of files that use each other, which have all files of a cycle in them."""
    shown = set()
    for start in sorted(cycle):
        if start in shown:
            continue
        users, waiting = {}, [start]
        while start not in users:
            file = waiting.pop(0)
            for used in sorted((uses[file] & cycle) - set(users)):
                users[used] = file
                waiting.append(used)
        chain = [start, users[start]]
        while chain[-1] != start:
            chain.append(users[chain[-1]])
        shown.update(chain)
        yield chain[::-1]
