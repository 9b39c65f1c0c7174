#!/usr/bin/env python3
"""Encodes texts by a tokenizer.json, for tokenize_main: it is what knows the library.

    encode.py TOKENIZER_JSON ADD_SPECIAL_TOKENS(0|1) END_TOKEN

Numbers are u32, little-endian. First it says 0, how many ids there are, the id of END_TOKEN (0 if that
is empty); then it takes batches, texts as UTF-8, and gives ids:

    in:  number of texts, then of each: number of bytes, bytes
    out: 0, then of each text: number of ids, ids

or, instead of a 0, once and for the last time: 1, number of bytes, a message.
"""

import struct
import sys


class Refused(Exception):
    pass


def loaded(path, end):
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise Refused("this Python (%s) has no tokenizers: %s" % (sys.executable, error))
    try:
        tokenizer = Tokenizer.from_file(path)
    except Exception as error:  # pylint: disable=broad-except
        raise Refused("%s: is no tokenizer.json: %s" % (path, error))
    ids = tokenizer.get_vocab(with_added_tokens=True)
    if not ids:
        raise Refused("%s: has no tokens" % path)
    if end and end not in ids:
        raise Refused("%s: has no token '%s'" % (path, end))
    # What the file says of padding and truncation is for models that take a text at a time.
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer, max(ids.values()) + 1, ids.get(end, 0)


def main():
    path, special, end = sys.argv[1:]
    source, out = sys.stdin.buffer, sys.stdout.buffer

    def number():
        return struct.unpack("<I", source.read(4))[0]

    try:
        tokenizer, num_ids, end_id = loaded(path, end)
        out.write(struct.pack("<III", 0, num_ids, end_id))
        out.flush()
        done = 0
        while True:
            header = source.read(4)
            if not header:
                return
            # All of them first: who still sends does not read what is wrong with one.
            batch = [source.read(number()) for _ in range(struct.unpack("<I", header)[0])]
            texts = []
            for i, data in enumerate(batch):
                try:
                    texts.append(data.decode("utf-8"))
                except UnicodeDecodeError as error:
                    raise Refused("text %d is no UTF-8: byte %d is 0x%02x" % (done + i, error.start, data[error.start]))
            done += len(texts)
            reply = [struct.pack("<I", 0)]
            for encoding in tokenizer.encode_batch(texts, add_special_tokens=special == "1"):
                ids = encoding.ids
                reply.append(struct.pack("<%dI" % (len(ids) + 1), len(ids), *ids))
            out.write(b"".join(reply))
            out.flush()
    except Refused as error:
        message = str(error).encode("utf-8", "replace")
        out.write(struct.pack("<II", 1, len(message)) + message)
        out.flush()


if __name__ == "__main__":
    main()
