"""Prelude of a program that reads stdin: complete sys.stdin and sys.stdout, including their byte buffers."""

import builtins as _builtins
import io as _io
import os as _os
import sys as _sys


class _Bytes(_io.RawIOBase):
    def __init__(self, text):
        self._text = text

    def writable(self):
        return True

    def write(self, data):
        self._text.write(bytes(data).decode("utf-8", "replace"))
        return len(data)


vars(_builtins).update(exit=_sys.exit, quit=_sys.exit)
_given = _sys.stdin.read().encode()
try:
    with open("stdin", "wb") as _file:
        _file.write(_given)
    _os.dup2(_os.open("stdin", _os.O_RDONLY), 0)
    _os.unlink("stdin")
except OSError:
    pass
_sys.stdin = _io.TextIOWrapper(_io.BytesIO(_given), "utf-8")
setattr(_sys.stdout, "buffer", _Bytes(_sys.stdout))  # noqa: B010 - a property of other streams
