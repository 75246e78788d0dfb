"""Prometheus: every series of every service, by a real parser: its type, its name, its labels, and that a run does not
add series.
"""

import asyncio
import re

import httpx
import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from services.trainer.metrics.step_metrics import StepMetrics
from shared.process.telemetry import REGISTRY, exposition
from tests.docs.commands import PAGES
from tests.fuzz.stack import OPENERS, RUN, TOKEN, open_stack, run_config
from tools.docs.service import metrics

UNITS = re.compile(r"_(ms|milliseconds|minutes|hours|kb|mb|percent)(_|$)")


def name_of(family):
    return f"{family.name}_total" if family.type == "counter" and not family.name.endswith("_total") else family.name


def ours(families):
    return {name_of(family): family for family in families if not family.name.startswith(("process_", "python_"))}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_names_metrics_that_exist(page):
    named = set(re.findall(r"`(volley_\w+)[`{]", page.read_text(encoding="utf-8"))) - {"volley_episode", "volley_verl"}
    assert named <= ours(REGISTRY.collect()).keys()


def test_names_follow_the_conventions():
    assert OPENERS, "their import defines all metrics"
    for name, family in ours(REGISTRY.collect()).items():
        assert name.startswith("volley_")
        assert family.documentation
        assert not UNITS.search(name), "base units: seconds, bytes, ratios"
        assert name.endswith("_total") == (family.type == "counter")
        if "_seconds" in name:
            assert family.type in ("histogram", "counter")


@pytest.mark.parametrize(
    ("accept", "openmetrics"),
    [
        ("", False),
        ("*/*", False),
        ("application/openmetrics-text", True),
        ("application/openmetrics-text;q=0,text/plain", False),
        ("application/openmetrics-text; version=1.0.0; q=0.0, */*", False),
        ("application/openmetrics-text;q=0.3,text/plain;q=0.8", False),
        ("text/plain;q=0.3,application/openmetrics-text;version=1.0.0;q=0.8", True),
        (
            "application/openmetrics-text;version=0.0.1;q=0.9,application/openmetrics-text;version=1.0.0;q=0.5,text/plain;q=0.1",
            True,
        ),
        ("application/openmetrics-text;q=high,text/plain", False),
        ("application/openmetrics-text;version=newest", False),
    ],
)
def test_the_format_is_the_one_a_client_likes_best(accept, openmetrics):
    content, media_type = exposition(accept)
    assert media_type.startswith("application/openmetrics-text" if openmetrics else "text/plain")
    assert content.endswith(b"# EOF\n") == openmetrics


def test_every_measure_of_a_step_is_served():
    measures = {name for name, kind in StepMetrics.__annotations__.items() if str(kind).startswith("float")} - {
        "retried_tokens"
    }
    assert measures <= {name.removeprefix("volley_trainer_") for name in ours(REGISTRY.collect())}


def series(text, parse=parse_text):
    """{(series, labels)}, each of a defined metric; raises where the text is no valid exposition."""
    labels = {metric["name"]: set(metric["labels"]) for metric in metrics()}
    found = set()
    for family in parse(text):
        if family.name.startswith(("process_", "python_")):
            continue
        defined = labels[name_of(family)]
        for sample in family.samples:
            assert not sample.name.endswith("_created")
            assert set(sample.labels) - {"le"} == defined, sample
            assert not any(re.search(r"e\d{6}-s\d{6}", value) for value in sample.labels.values()), sample
            found.add((sample.name, tuple(sorted(sample.labels.items()))))
    return found


async def test_a_run_that_goes_on_adds_no_series_with_its_versions(tmp_path, redis_server):
    headers = {"Authorization": f"Bearer {TOKEN}"}
    async with (
        open_stack(run_config(tmp_path, redis_server.url)) as urls,
        httpx.AsyncClient(trust_env=False, timeout=60, headers=headers) as client,
    ):
        await client.post(f"{urls['orchestrator']}/runs/{RUN}/resume")

        async def at_step(n):
            """Once the rollout server, which looks at its engine once a second, has seen that step's weights."""
            async with asyncio.timeout(120):
                while True:
                    texts = {name: (await client.get(f"{url}/metrics")).text for name, url in urls.items()}
                    (seen,) = re.findall(r"^volley_rollout_weights_step (\S+)$", texts["rollout"], re.MULTILINE)
                    if float(seen) >= n:  # not while it is NaN
                        return texts
                    await asyncio.sleep(0.05)

        def steady(texts):
            return {
                found
                for text in texts.values()
                for found in series(text)
                if found[0].startswith(("volley_trainer", "volley_rollout"))
            }

        first, later = await at_step(4), await at_step(12)
        assert steady(first) == steady(later)
        assert (("volley_rollout_weights_step"), ()) in steady(later)
        accept = {"Accept": "application/openmetrics-text; version=1.0.0"}
        for url in urls.values():
            answer = await client.get(f"{url}/metrics", headers=accept)
            assert answer.headers["content-type"].startswith("application/openmetrics-text")
            assert series(answer.text, parse_openmetrics)
        values = {family.name: family.samples for family in parse_text(later["trainer"])}
        for name in (
            "kl",
            "entropy",
            "staleness_mean",
            "staleness_max",
            "logprob_abs_diff",
            "clip_fraction",
            "grad_norm",
            "reward_mean",
        ):
            (sample,) = values[f"volley_trainer_{name}"]
            assert sample.value == sample.value, f"{name} is NaN after a step"
