"""No class name is defined twice."""

import ast
from collections import defaultdict

from volley.layout import PROJECT

FOLDERS = ("services", "shared", "volley", "tools", "packages/*/volley_*")


def test_no_class_name_is_defined_twice():
    found = defaultdict[str, list[str]](list)
    for folder in FOLDERS:
        for file in sorted(path for root in PROJECT.glob(folder) for path in root.rglob("*.py")):
            for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
                if isinstance(node, ast.ClassDef):
                    found[node.name].append(str(file.relative_to(PROJECT)))
    assert found
    assert {name: files for name, files in found.items() if len(files) > 1} == {}
