#!/usr/bin/env python3
"""That abi_test.py sees what it is there for: each kind of change of the header, and libraries of two versions.

    abi_gate_test.py FOLDER
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
import unittest

FOLDER = os.path.abspath(sys.argv.pop(1) if len(sys.argv) > 1 and os.path.isdir(sys.argv[1]) else os.path.dirname(__file__))
sys.dont_write_bytecode = True  # beside the sources
sys.path.insert(0, FOLDER)
import abi_test  # noqa: E402
import interface  # noqa: E402

HEADER = abi_test.read(os.path.join(FOLDER, "shardweave.h"))


def changed(old, new):
    assert HEADER.count(old) == 1, (old, HEADER.count(old))
    return HEADER.replace(old, new)


def complaints(header):
    return list(interface.incompatibilities(interface.parse(HEADER), interface.parse(header)))


class GateTest(unittest.TestCase):
    def complains(self, old, new, what):
        found = complaints(changed(old, new))
        self.assertEqual(len(found), 1, found)
        self.assertIn(what, found[0])

    def test_the_same(self):
        self.assertEqual(complaints(HEADER), [])

    def test_comments_and_names_of_parameters_are_free(self):
        self.assertEqual(complaints(changed("swv_seed(uint64_t seed);", "swv_seed(uint64_t number); /* another name */")), [])

    def test_what_is_not_installed(self):
        self.assertEqual(list(abi_test.check_alone(HEADER)), [])
        self.assertIn("comm/backend.h", "".join(abi_test.check_alone(HEADER + "/* Contracts: comm/backend.h. */")))

    def test_rules_of_names_and_types(self):
        rules = lambda header: "\n".join(abi_test.check_rules(header, interface.parse(header)))  # noqa: E731
        self.assertEqual(rules(HEADER), "")
        for old, new, what in (
                ("SWV_REDUCE_MAX = 3", "SWV_MAX = 3", "numbers of swv_reduce_op do not all begin"),
                ("SWV_DEVICE_CPU = 0, SWV_DEVICE_CUDA = 1", "SWV_REDUCE_CPU = 0, SWV_REDUCE_CUDA = 1", "numbers of swv_device_type"),
                ("const swv_comm* comm, int32_t* ranks,", "const swv_comm* comm, int64_t* ranks,", "a ranks is int64_t"),
                ("swv_mesh_seed(swv_mesh* mesh,", "swv_mesh_seed(const swv_mesh* mesh,", "swv_mesh_seed takes a const handle"),
                ("swv_work_share(const swv_work* work,", "swv_work_twice(const swv_work* work,", "swv_work has no second handle"),
                ("  size_t struct_size;\n  uint64_t seed;", "  uint64_t seed;", "swv_random_state has no struct_size")):
            self.assertIn(what, rules(HEADER.replace(old, new)), old)
        # What 0.2 was.
        before = abi_test.read(os.path.join(FOLDER, "abi/0.2/shardweave.h"))
        for what in ("numbers of swv_code do not", "a world_ranks is int64_t", "swv_tensor_set_grad takes a const handle",
                     "swv_layout has no second handle", "swv_buffer has no struct_size"):
            self.assertIn(what, rules(before))

    def test_machines_of_32_bits(self):
        if shutil.which("cc") is None:
            self.skipTest("no C compiler on this machine")
        for flags, fails in (([], False), (["-m32", "-ffreestanding"], True)):
            result = subprocess.run(["cc", "-fsyntax-only", *flags, "-x", "c", os.path.join(FOLDER, "shardweave.h")], text=True,
                                    capture_output=True, check=False)
            self.assertEqual(result.returncode != 0, fails, result.stderr)
            self.assertEqual("Shardweave is for 64-bit machines" in result.stderr, fails)

    def test_prototypes(self):
        self.complains("swv_seed(uint64_t seed)", "swv_seed(int64_t seed)", "swv_seed was swv_status* (uint64_t) in")
        self.complains("swv_seed(uint64_t seed)", "swv_seed(uint64_t seed, int32_t rank)", "swv_seed was")
        self.complains("SWV_API size_t swv_dtype_size", "SWV_API int64_t swv_dtype_size", "swv_dtype_size was")
        self.complains("SWV_API void swv_trace_free(swv_trace* trace);", "", "swv_trace_free of")

    def test_structs(self):
        # The same name and place, another type; names change places; a member in the middle.
        self.complains("  double norm_type;", "  int64_t norm_type;", "struct swv_clip_options is not")
        self.complains("  int64_t calls;\n  int64_t bytes;", "  int64_t bytes;\n  int64_t calls;", "struct swv_comm_counter is not")
        self.complains("  double dampening;", "  double more;\n  double dampening;", "struct swv_sgd_options is not")
        self.complains("  double latency; ", "  double more;\n  double latency; ", "struct swv_link_cost is not")
        self.complains("  int64_t calls;\n  int64_t bytes;", "  int64_t calls;\n  int64_t bytes;\n  int64_t more;",
                       "struct swv_comm_counter of")

    def test_a_struct_grows(self):
        tail = "SWV_SIZE_TO(swv_random_state, offset), 0, 0}"
        grown = changed("drawn so far */\n} swv_random_state;", "drawn so far */\n  double more;\n} swv_random_state;")
        self.assertIn("the initializer of swv_random_state ends with offset", "".join(complaints(grown)))
        good = grown.replace(tail, "SWV_SIZE_TO(swv_random_state, more), 0, 0, 0.0}")
        self.assertEqual(complaints(good), [])
        other = grown.replace(tail, "SWV_SIZE_TO(swv_random_state, more), 0, 0, 0.5}")
        self.assertIn("has the default 0.5", "".join(complaints(other)))
        if shutil.which("abidiff") and shutil.which("cc"):
            self.assertEqual(self.abidiff(good), 0)
            self.assertNotEqual(self.abidiff(changed("  double norm_type;", "  int64_t norm_type;")), 0)

    def abidiff(self, header):
        with tempfile.TemporaryDirectory() as scratch:
            os.mkdir(f"{scratch}/abi")
            shutil.copytree(f"{FOLDER}/abi/0.3", f"{scratch}/abi/0.3")
            with open(f"{scratch}/abi/0.3/shardweave.h", "w", encoding="utf-8") as file:
                file.write(HEADER)
            with open(f"{scratch}/shardweave.h", "w", encoding="utf-8") as file:
                file.write(header)
            return len(abi_test.abidiff(scratch, {"0.3/shardweave.h": ""}, interface.parse(header))[0])

    def test_no_member_in_the_padding(self):
        grown = changed("  swv_bool nesterov;\n} swv_sgd_options;", "  swv_bool nesterov;\n  int32_t more;\n} swv_sgd_options;")
        grown = grown.replace("SWV_SIZE_TO(swv_sgd_options, nesterov), 1e-3, 0.0, 0.0, 0.0, 0}",
                              "SWV_SIZE_TO(swv_sgd_options, more), 1e-3, 0.0, 0.0, 0.0, 0, 0}")
        self.assertIn("swv_sgd_options.more lies in the padding", "".join(complaints(grown)))

    def test_numbers_types_and_handles(self):
        self.complains("SWV_REDUCE_MIN = 2", "SWV_REDUCE_MIN = 5", "SWV_REDUCE_MIN was 2")
        self.complains("typedef int32_t swv_checks;", "typedef int64_t swv_checks;", "swv_checks was int32_t")
        header = HEADER.replace("typedef struct swv_plan swv_plan;", "")
        self.assertIn("swv_plan of", "".join(complaints(header)))

    def test_what_was_frozen_is_not_edited(self):
        with tempfile.TemporaryDirectory() as scratch:
            os.makedirs(f"{scratch}/abi")
            for version in {path.split("/")[0] for path in abi_test.FROZEN}:
                shutil.copytree(f"{FOLDER}/abi/{version}", f"{scratch}/abi/{version}")
            now = interface.parse(HEADER)
            self.assertEqual(list(abi_test.check_frozen(now, scratch, abi_test.FROZEN)), [])
            with open(f"{scratch}/abi/0.3/shardweave.h", "a", encoding="utf-8") as file:
                file.write("/* a word more */\n")
            found = list(abi_test.check_frozen(now, scratch, abi_test.FROZEN))
            self.assertEqual(len(found), 1)
            self.assertIn("abi/0.3/shardweave.h was edited after it was frozen", found[0])
            with open(f"{scratch}/abi/0.3/client.c", "w", encoding="utf-8") as file:
                file.write("/* swv_buffer */\n")
            self.assertIn("abi/0.3/client.c does not use swv_buffer", "\n".join(abi_test.check_frozen(now, scratch, abi_test.FROZEN)))

    def test_what_is_committed_is_the_header(self):
        committed = abi_test.read(f"{FOLDER}/abi/interface.txt")
        script = abi_test.read(f"{FOLDER}/shardweave.lds")
        check = lambda header: "\n".join(abi_test.check_committed(interface.parse(header), committed, script))  # noqa: E731
        self.assertEqual(check(HEADER), "")
        self.assertIn("+function 0.4 swv_seed: swv_status* (int64_t)", check(changed("swv_seed(uint64_t", "swv_seed(int64_t")))

    def test_sonames(self):
        self.assertEqual([interface.soname(v) for v in ("0.2", "1.0", "1.7", "2.0")],
                         ["libshardweave.so.0.2", "libshardweave.so.1", "libshardweave.so.1", "libshardweave.so.2"])


@unittest.skipUnless(shutil.which("cc"), "no C compiler on this machine")
class TwoVersionsTest(unittest.TestCase):
    """A program of 1.0 runs on 1.1; one that needs what 1.1 brought is told so by 1.0."""

    def setUp(self):
        self.scratch = tempfile.TemporaryDirectory()
        self.addCleanup(self.scratch.cleanup)

    def path(self, name):
        return os.path.join(self.scratch.name, name)

    def library(self, version, versions):
        folder = self.path(version)
        os.mkdir(folder)
        with open(f"{folder}/library.c", "w", encoding="utf-8") as file:
            file.writelines(f"int {name}(void) {{ return {i}; }}\n" for i, name in enumerate(versions, 1))
        with open(f"{folder}/library.lds", "w", encoding="utf-8") as file:
            file.write(interface.version_script(versions, "1.0"))
        soname = interface.soname(version)
        subprocess.run(["cc", "-shared", "-fPIC", "-o", f"{folder}/{soname}", f"{folder}/library.c", f"-Wl,-soname,{soname}",
                        f"-Wl,--version-script={folder}/library.lds"], check=True)
        self.assertEqual(list(abi_test.check_library(f"{folder}/{soname}", versions, version)), [])
        return f"{folder}/{soname}"

    def program(self, library, *functions):
        name = self.path("_".join(functions))
        with open(name + ".c", "w", encoding="utf-8") as file:
            file.writelines(f"int {f}(void);\n" for f in functions)
            file.write("int main(void) { return " + " + ".join(f"{f}()" for f in functions) + "; }\n")
        subprocess.run(["cc", "-o", name, name + ".c", library], check=True)
        return name

    def run_with(self, program, library):
        return subprocess.run([program], env={**os.environ, "LD_LIBRARY_PATH": os.path.dirname(library)}, capture_output=True,
                              text=True, check=False)

    def test_programs(self):
        first = self.library("1.0", {"swv_a": "1.0", "swv_b": "1.0"})
        second = self.library("1.1", {"swv_a": "1.0", "swv_b": "1.0", "swv_c": "1.1"})
        old, new = self.program(first, "swv_a", "swv_b"), self.program(second, "swv_a", "swv_c")
        self.assertEqual(self.run_with(old, first).returncode, 3)
        self.assertEqual(self.run_with(old, second).returncode, 3)
        self.assertEqual(self.run_with(new, second).returncode, 4)
        refused = self.run_with(new, first)
        self.assertEqual(refused.returncode, 1)
        self.assertIn("SHARDWEAVE_1.1", refused.stderr)

    def test_a_symbol_in_the_wrong_node(self):
        library = self.library("1.1", {"swv_a": "1.0", "swv_b": "1.1"})
        found = list(abi_test.check_library(library, {"swv_a": "1.1", "swv_b": "1.1"}, "1.1"))
        self.assertEqual(found, ["swv_a is in the node SHARDWEAVE_1.0; it came with 1.1"])
        self.assertTrue(re.search("swv_a is new", "".join(abi_test.check_library(library, {"swv_b": "1.1"}, "1.1"))))


if __name__ == "__main__":
    unittest.main()
