#!/usr/bin/env python3
"""compile_commands.py, on what Bazel once said of five actions (testdata/aquery.json)."""

import json
import os
import sys
import tempfile
import unittest

HERE = os.path.dirname(os.path.abspath(__file__))
sys.dont_write_bytecode = True  # beside the sources
sys.path.insert(0, HERE)
import compile_commands  # noqa: E402

ROOT = "/ob/execroot/shardweave"


def pairs(arguments, option):
    return [value for name, value in zip(arguments, arguments[1:]) if name == option]


class CompileCommandsTest(unittest.TestCase):
    def setUp(self):
        with open(os.path.join(HERE, "testdata/aquery.json"), encoding="utf-8") as file:
            self.actions = json.load(file)
        self.entries = self.convert(self.actions)

    def convert(self, actions):
        entries = compile_commands.compile_commands(actions, "/checkout", ROOT, "/links")
        return {entry["file"]: entry for entry in entries}

    def test_each_file_once(self):
        generated = ROOT + "/bazel-out/k8-opt/bin/capi/header_example.c"
        self.assertEqual(list(self.entries), [generated, "capi/version.cc", "mesh/device_mesh.cc"])
        self.assertEqual({entry["directory"] for entry in self.entries.values()}, {"/checkout"})
        for entry in self.entries.values():
            self.assertEqual(pairs(entry["arguments"], "-c"), [entry["file"]])

    def test_special_purposes_do_not_count(self):
        for actions in (self.actions["actions"], self.actions["actions"][::-1]):
            arguments = self.convert({"actions": actions})["capi/version.cc"]["arguments"]
            self.assertEqual(pairs(arguments, "-include"), [])
            self.assertNotIn("-fsanitize=address", arguments)

    def test_headers_of_the_checkout_come_first(self):
        for entry in self.entries.values():
            folders = pairs(entry["arguments"], "-I")
            self.assertEqual(folders[0], "/links")
            self.assertGreater(len(folders), 1)
            for folder in folders[1:]:
                self.assertRegex(folder, f"^{ROOT}/bazel-out/.*/_virtual_includes/")

    def test_folders_exist_wherever_one_stands(self):
        arguments = self.entries["mesh/device_mesh.cc"]["arguments"]
        self.assertEqual(pairs(arguments, "-iquote")[0], ".")  # the checkout
        self.assertIn("/ob/external/absl/include", pairs(arguments, "-isystem"))
        for entry in self.entries.values():
            for option in ("-I", "-iquote", "-isystem"):
                for folder in pairs(entry["arguments"], option):
                    self.assertTrue(folder == "." or folder.startswith("/"), folder)

    def test_nothing_of_gcc_alone_nothing_that_writes(self):
        for entry in self.entries.values():
            arguments = entry["arguments"]
            self.assertFalse({"-fno-canonical-system-headers", "-Wno-restrict", "-MD", "-MF", "-Werror"} & set(arguments))
            self.assertFalse([a for a in arguments if a.endswith(".d") or a.startswith("-frandom-seed")])
            self.assertTrue({"-std=c++20", "-std=c11"} & set(arguments))

    def test_a_link_is_led_elsewhere(self):
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "a", "shardweave")
            for target in (folder, folder, HERE):
                compile_commands.link(path, target)
                self.assertEqual(os.readlink(path), target)


if __name__ == "__main__":
    unittest.main()
