"""A check that prints bytes that are no text, answers with what is no JSON and exits."""

import os
import sys


def run(bench):
    sys.stdout.buffer.write(b"\xff\xfe\x00garbage\x1b[31m\r\n" * 20_000)
    sys.stdout.flush()
    (bench.directory / "answer.json").write_bytes(b'{"status": "ok", \xff')
    (bench.directory / "facts-other.json").write_bytes(b"[1, 2")
    os._exit(0)
