"""Render a chart with Helm's own code and check its objects. Runs in an environment with `REQUIREMENTS`, not in ours.

Standard input is JSON: `chart` (folder), `cases` (values by name), `releases` (of Kubernetes), `schemas` (of other
objects: kind -> release -> JSON schema), `apiserver` (URL, or null if there is no cluster to look into), and `name` and
`namespace` of the chart's release. Standard output gives for each case `error`, or `objects` and their `faults`.
"""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

REQUIREMENTS = ("helm-python-sdk==0.2.2", "kubernetes-validate==1.37.0")


def main() -> None:
    import helm_python
    import yaml
    from kubernetes_validate import utils

    utils.schema_contents = functools.cache(utils.schema_contents)  # it reads some MB for each object
    asked = json.load(sys.stdin)
    chart, answers = helm_python.Chart.load(asked["chart"]), {}
    url = asked["apiserver"]
    render = functools.partial(helm_python.Config(kube_apiserver=url).render, chart) if url else chart.render
    for name, values in asked["cases"].items():
        try:
            files = render(values, name=asked["name"], namespace=asked["namespace"])
        except helm_python.HelmError as error:
            answers[name] = {"error": str(error)}
            continue
        texts = (text for path, text in files.items() if path.endswith(".yaml"))
        objects = [made for text in texts for made in yaml.safe_load_all(text) if made]
        faults = helm_python.lint(asked["chart"], values)["errors"]
        faults += [fault for made in objects for fault in _faults(made, asked["releases"], asked["schemas"])]
        answers[name] = {"objects": objects, "faults": faults}
    json.dump(answers, sys.stdout)


def _faults(made: Mapping[str, Any], releases: Sequence[str], schemas: Mapping[str, Any]) -> Iterator[str]:
    import jsonschema
    from kubernetes_validate import SchemaNotFoundError, ValidationError, utils

    kind = made["kind"]
    for release, schema in schemas.get(kind, {}).items():
        found = jsonschema.Draft7Validator(schema).iter_errors(made)
        yield from (f"{kind} {release} {error.json_path}: {error.message[:300]}" for error in found)
    if kind == "JobSet":
        for job in made["spec"]["replicatedJobs"]:
            inner = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "inner"}, **job["template"]}
            yield from _faults(inner, releases, schemas)
    for release in () if kind in schemas else releases:
        try:
            utils.validate(made, release, strict=True)
        except (ValidationError, SchemaNotFoundError) as error:
            yield f"{kind} {release}: {error.message}"[:400]


if __name__ == "__main__":
    main()
