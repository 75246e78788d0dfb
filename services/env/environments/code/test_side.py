"""Runs in the sandbox of the tests, which the answer never enters: the data set's test program, in which names of the
answer stand for questions to the other sandbox.

What comes back is made into plain values of Python's own here, or into a `_Stand` for anything else, which equals
nothing but itself: an object of the answer cannot say of itself that it is right.
"""

import builtins as _builtins
import json as _json
import queue as _queue
import sys as _sys
import threading as _threading

_asked, _told = _queue.Queue(), _queue.Queue()
_ERRORS = {
    name: kind
    for name, kind in vars(_builtins).items()
    if isinstance(kind, type) and issubclass(kind, Exception) and not issubclass(kind, UnicodeError)
}
"""What the answer may raise here: nothing that ends a program, nothing that needs more than a text."""


class _Stand:
    """Something of the answer that is no plain value: a function, a class, an object of a class of its own. `_of` says
    which.
    """

    def __init__(self, of):
        self.__dict__["_of"] = of

    def __call__(self, *args, **kwargs):
        return _ask("call", self._of, args, kwargs)

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return _ask("attribute", self._of, (name,))

    def __setattr__(self, name, value):
        _ask("set", self._of, (name, value))

    def __getitem__(self, key):
        return _ask("item", self._of, (key,))

    def __iter__(self):
        return iter(_ask("iterate", self._of))

    def __len__(self):
        return _ask("length", self._of)

    def __bool__(self):
        return True


def _ask(do, of, args=(), kwargs=None):
    question = {"do": do, "of": of, "args": [_plain(arg) for arg in args]}
    question["kwargs"] = {key: _plain(arg) for key, arg in (kwargs or {}).items()}
    _asked.put({"ask": question})
    reply = _told.get()
    if "error" in reply:
        name, text = reply["error"]
        raise _ERRORS.get(str(name), RuntimeError)(str(text))
    return _value(reply["value"])


def _plain(value, depth=0):
    """A value as JSON. Raises TypeError for what the answer cannot be given."""
    if depth > 60:
        raise RecursionError("the value is nested too deep")
    kind = type(value)
    if value is None or kind in (bool, float, str):
        return value
    if kind is int:
        return value if abs(value) < 2**1000 else {"i": hex(value)}
    if kind is _Stand:
        return value._of
    if isinstance(value, dict):
        return {"d": [[_plain(k, depth + 1), _plain(v, depth + 1)] for k, v in value.items()]}
    for base, tag in ((list, "l"), (tuple, "t"), (set, "s"), (frozenset, "f")):
        if isinstance(value, base):
            return {tag: [_plain(item, depth + 1) for item in value]}
    if isinstance(value, (bytes, bytearray)):
        return {"b": bytes(value).hex()}
    if isinstance(value, complex):
        return {"c": [value.real, value.imag]}
    if isinstance(value, range):
        return {"r": [value.start, value.stop, value.step]}
    raise TypeError(f"a test cannot give the answer a {kind.__name__}")


def _value(told):
    if not isinstance(told, dict):
        return told
    ((tag, body),) = told.items()
    if tag == "d":
        return {_value(k): _value(v) for k, v in body}
    if tag in ("l", "t", "s", "f"):
        return {"l": list, "t": tuple, "s": set, "f": frozenset}[tag](_value(item) for item in body)
    if tag == "b":
        return bytes.fromhex(body)
    if tag == "c":
        return complex(*body)
    if tag == "r":
        return range(*body)
    if tag == "i":
        return int(body, 16)
    return _Stand({"h": int(body)})


class _Names(dict):
    """The test program's own names; then Python's; then the standard library's modules; then the answer's."""

    def __missing__(self, name):
        if hasattr(_builtins, name):
            return getattr(_builtins, name)
        if name in _sys.stdlib_module_names:
            return __import__(name)
        if name in self["_names_of_answer"]:
            return _Stand({"n": name})
        raise KeyError(name)


def _test(preamble, program, names, tested):
    scope = _Names(__name__="tests", print=lambda *args, **kwargs: None, _names_of_answer=frozenset(names))
    try:
        exec(compile(preamble, "preamble.py", "exec"), scope)  # noqa: S102 - this is a sandbox
        scope.pop(tested, None)
        exec(compile(program, "tests.py", "exec"), scope)  # noqa: S102
        _asked.put({"passed": True})
    except AssertionError:
        _asked.put({"passed": False, "why": "wrong"})
    except BaseException as error:  # noqa: BLE001 - a verdict like any other
        _asked.put({"passed": False, "why": "exception", "detail": f"{type(error).__name__}: {error}"[:300]})


def _begin(preamble, program, names, tested):
    _threading.stack_size(64 * 2**20)
    _threading.Thread(target=_test, args=(preamble, program, names, tested), daemon=True).start()
    return _json.dumps(_asked.get())


def _go_on(reply):
    _told.put(_json.loads(reply))
    return _json.dumps(_asked.get())
