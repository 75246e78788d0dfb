"""Runs in the sandbox of the answer, before it: calls functions of the answer by name, and tells what they gave.

Nothing here is trusted: the answer may do as it likes with it. What it says is a value, which is read elsewhere as
plain data, and judged where the answer cannot reach.
"""

import json as _json
import sys as _sys

_kept = {}
__name__ = "answer"
_sys.modules[__name__] = _sys.modules["__main__"]


def _told(value, depth=0):
    if depth > 60:
        raise RecursionError("the value is nested too deep")
    kind = type(value)
    if value is None or kind in (bool, float, str):
        return value
    if kind is int:
        return value if abs(value) < 2**1000 else {"i": hex(value)}
    for base in (int, float, str):
        if isinstance(value, base):
            return _told(base(value))
    if isinstance(value, dict):
        return {"d": [[_told(k, depth + 1), _told(v, depth + 1)] for k, v in value.items()]}
    for base, tag in ((list, "l"), (tuple, "t"), (set, "s"), (frozenset, "f")):
        if isinstance(value, base):
            return {tag: [_told(item, depth + 1) for item in value]}
    if isinstance(value, (bytes, bytearray)):
        return {"b": bytes(value).hex()}
    if isinstance(value, complex):
        return {"c": [value.real, value.imag]}
    if isinstance(value, range):
        return {"r": [value.start, value.stop, value.step]}
    _kept[id(value)] = value
    return {"h": id(value)}


def _read(told):
    if not isinstance(told, dict):
        return told
    ((tag, body),) = told.items()
    if tag == "d":
        return {_read(k): _read(v) for k, v in body}
    if tag in "ltsf":
        return {"l": list, "t": tuple, "s": set, "f": frozenset}[tag](_read(item) for item in body)
    if tag == "b":
        return bytes.fromhex(body)
    if tag == "c":
        return complex(*body)
    if tag == "r":
        return range(*body)
    if tag == "i":
        return int(body, 16)
    return _kept[body] if tag == "h" else globals()[body]


def _answer(asked):
    import itertools

    asked = _json.loads(asked)
    try:
        target = _read(asked["of"])
        args = [_read(arg) for arg in asked["args"]]
        match asked["do"]:
            case "call":
                found = target(*args, **{key: _read(arg) for key, arg in asked["kwargs"].items()})
            case "iterate":
                found = list(itertools.islice(target, 100_000))
            case "attribute":
                found = getattr(target, args[0])
            case "item":
                found = target[args[0]]
            case "length":
                found = len(target)
            case _:
                found = setattr(target, *args)
        return _json.dumps({"value": _told(found)})
    except Exception as error:  # noqa: BLE001 - what the answer raises is its answer
        return _json.dumps({"error": [type(error).__name__, str(error)[:500]]})
