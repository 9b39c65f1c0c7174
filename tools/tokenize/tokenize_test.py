#!/usr/bin/env python3
"""The command's files against the ids of Hugging Face's library itself, of a tokenizer that is trained here."""

import json
import os
import struct
import subprocess
import sys

sys.path.insert(0, os.path.realpath(os.path.join(os.environ["TEST_SRCDIR"], "tokenizers/python")))
from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers  # noqa: E402

FOLDER = os.environ["TEST_TMPDIR"]
TEXT = "The ship sailed on.\n  It came back:\r\nthe crew, the cat and the captain's n\u00e4ive parrot \U0001f99c!\n\n"


def path(name):
    return os.path.join(FOLDER, name)


def write(name, data):
    with open(path(name), "wb") as file:
        file.write(data)
    return path(name)


def run(*arguments, fails=False):
    result = subprocess.run(["tools/tokenize/tokenize", *arguments], capture_output=True, text=True, check=False)
    assert (result.returncode != 0) == fails, (arguments, result)
    return result.stderr if fails else result.stdout


def tokens_in(name):
    with open(path(name), "rb") as file:
        data = file.read()
    magic, version, width, count, vocab = struct.unpack("<8sIIQQ", data[:32])
    assert (magic, version, len(data)) == (b"SWVTOKEN", 1, 64 + count * width), data[:64]
    return list(struct.unpack("<%d%s" % (count, {1: "B", 2: "H", 4: "I"}[width]), data[64:])), width, vocab


def trained(name, vocab_size, special=("<|endoftext|>",)):
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, show_progress=False, special_tokens=list(special),
                                  initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    tokenizer.train_from_iterator([TEXT] * 3, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)])
    tokenizer.save(path(name))
    return tokenizer


def test_bytes():
    a, b = write("a.txt", TEXT.encode() * 20000), write("b.txt", bytes(range(256)))
    told = json.loads(run("--input=%s,%s" % (a, b), "--output=" + path("bytes"), "--json"))
    tokens, width, vocab = tokens_in("bytes")
    assert bytes(tokens) == TEXT.encode() * 20000 + bytes(range(256))
    assert (width, vocab) == (1, 256)
    assert told["tokens"] == told["bytes"] == len(tokens) and told["texts"] == 2 and told["type"] == "u8", told
    out = run("--input=" + b, "--output=" + path("bytes"))
    assert out == "%s: 256 tokens (u8) of 1 texts, 256 bytes\n" % path("bytes"), out


def test_tokenizer():
    library = trained("tokenizer.json", 300)
    a, b = write("a.txt", TEXT.encode() * 50), write("b.txt", "x <|endoftext|> y".encode())
    base = ["--input=%s,%s" % (a, b), "--output=" + path("ids"), "--tokenizer=" + path("tokenizer.json")]
    texts = [TEXT * 50, "x <|endoftext|> y"]

    def ids(texts, special=False, end=()):
        return [i for t in texts for i in [*library.encode(t, add_special_tokens=special).ids, *end]]

    run(*base)
    tokens, width, vocab = tokens_in("ids")
    assert tokens == ids(texts) and width == 2 and vocab == library.get_vocab_size() == 300
    assert library.decode(tokens[: len(ids(texts[:1]))], skip_special_tokens=False).replace("\u0120", " ")
    run(*base, "--end=<|endoftext|>")
    assert tokens_in("ids")[0] == ids(texts, end=[0])
    run(*base, "--special_tokens")
    assert tokens_in("ids")[0] == ids(texts, special=True) != ids(texts)
    # More lines than go to the encoder at once.
    write("a.txt", TEXT.encode() * 9000)
    told = json.loads(run(*base, "--lines", "--end=<|endoftext|>", "--json"))
    lines = [line.rstrip("\r") for line in (TEXT * 9000).split("\n")[:-1]] + [texts[1]]
    assert tokens_in("ids")[0] == ids(lines, end=[0])
    assert told["texts"] == len(lines) == 36001, told


def test_wide():
    vocab = {chr(0x4E00 + i): 4 * i for i in range(20000)}  # with ids that there are not
    json_file = {"version": "1.0", "truncation": {"max_length": 2, "strategy": "LongestFirst", "stride": 0, "direction": "Right"},
                 "padding": None, "added_tokens": [], "normalizer": None, "pre_tokenizer": None, "post_processor": None,
                 "decoder": None, "model": {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
                                            "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False,
                                            "vocab": vocab, "merges": []}}
    write("wide.json", json.dumps(json_file).encode())
    source = write("wide.txt", "\u4e00\u9c1f\u4e01".encode())
    run("--input=" + source, "--output=" + path("wide"), "--tokenizer=" + path("wide.json"))
    assert tokens_in("wide") == ([0, 4 * (0x9C1F - 0x4E00), 4], 4, 79997)  # and not two of them


def test_errors():
    trained("tokenizer.json", 300)
    text = write("a.txt", b"some text")
    base = ["--output=" + path("none"), "--tokenizer=" + path("tokenizer.json")]
    for arguments, message in [
            ([], "--input is empty"),
            (["--input=" + text], "--output is empty"),
            (["--input=/nowhere", *base], "/nowhere: No such file"),
            (["--input=" + write("empty", b""), *base], "there is no text"),
            (["--input=" + FOLDER, *base], "directory"),
            (["--input=" + text, base[0], "--tokenizer=" + text], "is no tokenizer.json"),
            (["--input=" + text, base[0], "--tokenizer=/nowhere"], "/nowhere: is no tokenizer.json"),
            (["--input=" + text, *base, "--end=<end>"], "has no token '<end>'"),
            (["--input=" + text, base[0], "--end=x"], "--end wants --tokenizer"),
            (["--input=%s,%s" % (text, write("bad", b"ab\xffc")), *base], "text 1 is no UTF-8: byte 2 is 0xff"),
            # More than a pipe holds, after what is wrong.
            (["--lines", "--input=" + write("long", b"\xff\n" + b"words and words\n" * 100000), *base],
             "text 0 is no UTF-8"),
            (["--input=" + text, "--output=/nowhere/x"], "/nowhere/x"),
            (["--input=" + text, "--output=" + text], "which is read"),
            (["--input=" + text, base[1], "--output=" + path("tokenizer.json")], "which is read"),
            # A file whose reading fails.
            (["--input=" + text + ",/proc/self/mem", *base], "/proc/self/mem"),
            (["--input=" + text, *base, "more"], "'more': wanted flags only"),
    ]:
        error = run(*arguments, fails=True)
        assert message in error, (message, error)
        assert not os.path.exists(path("none")), arguments
        assert os.path.getsize(text) == 9


if __name__ == "__main__":
    test_bytes()
    test_tokenizer()
    test_wide()
    test_errors()
    print("PASS")
