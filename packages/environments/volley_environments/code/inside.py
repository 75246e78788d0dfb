"""Code that runs in both sandboxes of asserts, the answer's and the tests', which the answer never enters.

In the tests' sandbox, names of the answer are proxies (`_Stand`) that send questions to the answer's sandbox. Replies
become plain Python values; anything else becomes a `_Stand`, which equals only itself, so an object of the answer
cannot declare itself right. The answer's sandbox is untrusted, because the answer can change anything in it.
"""

import builtins as _builtins
import itertools as _itertools
import json as _json
import queue as _queue
import sys as _sys
import threading as _threading

_kept = {}
_asked, _replies = _queue.Queue(), _queue.Queue()
_ERRORS = {
    name: kind
    for name, kind in vars(_builtins).items()
    if isinstance(kind, type) and issubclass(kind, Exception) and not issubclass(kind, UnicodeError)
}
"""Exceptions that the answer may raise in the tests: none that ends a program or needs more than a text."""


def _plain(value, other, depth=0):
    """Encode a value as JSON; `other` encodes what is not a plain value."""
    if depth > 60:
        raise RecursionError("the value is nested too deep")
    kind = type(value)
    if value is None or kind in (bool, float, str):
        return value
    if kind is int:
        return value if abs(value) < 2**1000 else {"i": hex(value)}
    for base in (int, float, str):
        if isinstance(value, base):
            return _plain(base(value), other)
    if isinstance(value, dict):
        return {"d": [[_plain(k, other, depth + 1), _plain(v, other, depth + 1)] for k, v in value.items()]}
    for base, tag in ((list, "l"), (tuple, "t"), (set, "s"), (frozenset, "f")):
        if isinstance(value, base):
            return {tag: [_plain(item, other, depth + 1) for item in value]}
    if isinstance(value, (bytes, bytearray)):
        return {"b": bytes(value).hex()}
    if isinstance(value, complex):
        return {"c": [value.real, value.imag]}
    if isinstance(value, range):
        return {"r": [value.start, value.stop, value.step]}
    return other(value)


def _value(encoded, other):
    """Decode a value of `_plain`; `other` decodes unknown tags from (tag, body)."""
    if not isinstance(encoded, dict):
        return encoded
    ((tag, body),) = encoded.items()
    if tag == "d":
        return {_value(k, other): _value(v, other) for k, v in body}
    if tag in ("l", "t", "s", "f"):
        return {"l": list, "t": tuple, "s": set, "f": frozenset}[tag](_value(item, other) for item in body)
    if tag == "b":
        return bytes.fromhex(body)
    if tag == "c":
        return complex(*body)
    if tag == "r":
        return range(*body)
    return int(body, 16) if tag == "i" else other(tag, body)


def _be_answer():
    """Make the answer's sandbox look like an imported module, not a started program."""
    globals()["__name__"] = "answer"
    _sys.modules["answer"] = _sys.modules["__main__"]


def _keep(value):
    _kept[id(value)] = value
    return {"h": id(value)}


def _found(tag, body):
    return _kept[body] if tag == "h" else globals()[body]


def _answer(asked):
    asked = _json.loads(asked)
    try:
        target = _value(asked["of"], _found)
        args = [_value(arg, _found) for arg in asked["args"]]
        match asked["do"]:
            case "call":
                found = target(*args, **{key: _value(arg, _found) for key, arg in asked["kwargs"].items()})
            case "iterate":
                found = list(_itertools.islice(target, 100_000))
            case "attribute":
                found = getattr(target, args[0])
            case "item":
                found = target[args[0]]
            case "length":
                found = len(target)
            case _:
                found = setattr(target, *args)
        return _json.dumps({"value": _plain(found, _keep)})
    except Exception as error:  # noqa: BLE001 - the answer's exception is its reply
        return _json.dumps({"error": [type(error).__name__, str(error)[:500]]})


class _Stand:
    """Proxy of an object of the answer that is not a plain value: a function, a class, an instance.

    `_of` identifies the object.
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
    question = {"do": do, "of": of, "args": [_plain(arg, _known) for arg in args]}
    question["kwargs"] = {key: _plain(arg, _known) for key, arg in (kwargs or {}).items()}
    _asked.put({"ask": question})
    reply = _replies.get()
    if "error" in reply:
        name, text = reply["error"]
        raise _ERRORS.get(str(name), RuntimeError)(str(text))
    return _value(reply["value"], _stand)


def _known(value):
    """Encode a proxy. Raises TypeError for values that cannot be sent to the answer."""
    if type(value) is _Stand:
        return value._of
    raise TypeError(f"a test cannot give the answer a {type(value).__name__}")


def _stand(tag, body):
    return _Stand({"h": int(body)})


class _Names(dict):
    """Scope of the test program: its own names, then builtins, then modules of the standard library, then the answer's
    names.
    """

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
    except BaseException as error:  # noqa: BLE001 - an exception is a verdict
        _asked.put({"passed": False, "why": "exception", "detail": f"{type(error).__name__}: {error}"[:300]})


def _begin(preamble, program, names, tested):
    _threading.stack_size(64 * 2**20)
    _threading.Thread(target=_test, args=(preamble, program, names, tested), daemon=True).start()
    return _json.dumps(_asked.get())


def _go_on(reply):
    _replies.put(_json.loads(reply))
    return _json.dumps(_asked.get())
