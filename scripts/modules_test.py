#!/usr/bin/env python3
"""Tests of modules.py: small crates whose uses are known."""

import os
import tempfile
import unittest

import modules


def read(files):
    """The uses of a crate of these files, without `.rs`; and the paths of other crates that it names."""
    with tempfile.TemporaryDirectory() as root:
        for name, text in files.items():
            path = os.path.join(root, name + ".rs")
            os.makedirs(os.path.dirname(path), exist_ok=True)
            with open(path, "w", encoding="utf-8") as file:
                file.write(text)
        crate = modules.Crate(os.path.join(root, "lib.rs"))
        names = {file: os.path.relpath(file, root).removesuffix(".rs") for file in crate.uses}
        uses = {names[file]: {names[used] for used in all_used} for file, all_used in crate.uses.items()}
        return uses, {path for path, _, _ in crate.outside}


class Uses(unittest.TestCase):
    def test_each_form_of_a_path_counts(self):
        forms = {
            "use": "use crate::b::B;",
            "group": "use crate::{c, b::{self, B as Other}};",
            "super": "use super::b::B;",
            "inline path": "fn f() { let _ = crate::b::B; }",
            "imported module": "use crate as all; fn f(_: all::b::B) {}",
            "function's use": "fn f() { use crate::b::B; }",
            "inline module": "mod inner { use super::super::b::B; }",
            "glob": "use crate::b::*; fn f(_: B) {}",
            "after other tokens": "fn f<'a>(c: char) -> bool { c == '\"' || c == '\\'' } use crate::b::B; // \"",
        }
        for form, text in forms.items():
            with self.subTest(form):
                uses, _ = read({"lib": "mod a; mod b; mod c;", "a": text, "b": "pub struct B;", "c": ""})
                self.assertIn("b", uses["a"])

    def test_reexported_item_is_of_its_own_file(self):
        uses, _ = read(
            {
                "lib": "mod a; mod f; pub use f::Item; fn f() {}",
                "a": "use crate::Item; fn f(_: crate::f::Deep) {}",
                "f/mod": "mod item; mod deep; pub(crate) use item::Item; pub use deep::*;",
                "f/item": "pub struct Item;",
                "f/deep": "pub struct Deep;",
            }
        )
        self.assertEqual(uses["a"], {"f/item", "f/deep"})
        self.assertEqual((uses["lib"], uses["f/mod"]), (set(), set()))

    def test_reexport_that_the_module_uses_itself_counts(self):
        uses, _ = read({"lib": "mod a; pub use a::A; fn f(_: A) {}", "a": "pub struct A;"})
        self.assertEqual(uses["lib"], {"a"})

    def test_tests_comments_and_strings_do_not_count(self):
        text = """
            // use crate::b::B;
            /* use /* crate::b::B; */ crate::b::B; */
            const TEXT: &str = "\\"; use crate::b::B;";
            const RAW: &str = r#"" crate::b::B "#;
            #[cfg(test)] use crate::{b::B};
            #[cfg(test)] #[allow(unused)] fn f<T, U>() { crate::b::B; }
            #[cfg(all(test, unix))] mod tests { use crate::b::B; }
            struct S { #[cfg(test)] field: crate::b::B, other: u8 }
        """
        uses, _ = read({"lib": "mod a; mod b; #[cfg(test)] mod t;", "a": text, "b": "pub struct B;"})
        self.assertEqual(uses["a"], set())

    def test_paths_of_other_crates_are_whole(self):
        text = "use std::{fs as files, time}; fn f() { files::read(\"\"); time::Instant::now(); ::std::thread::yield_now() }"
        _, outside = read({"lib": "mod a;", "a": text})
        self.assertLessEqual({"std::fs::read", "std::time::Instant::now", "std::thread::yield_now"}, outside)


class Cycles(unittest.TestCase):
    def test_cycle_is_found_with_its_chain(self):
        uses = {"a": {"b"}, "b": {"c"}, "c": {"a", "d"}, "d": {"c"}, "e": {"a"}, "f": set()}
        cycles = modules.cycles(uses)
        self.assertEqual(cycles, [{"a", "b", "c", "d"}])
        self.assertEqual(list(modules.chains(uses, cycles[0])), [["a", "b", "c", "a"], ["d", "c", "d"]])

    def test_tree_has_no_cycle(self):
        self.assertEqual(modules.cycles({"a": {"b", "c"}, "b": {"c"}, "c": set()}), [])


unittest.main()
