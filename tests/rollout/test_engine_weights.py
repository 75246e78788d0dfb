"""Live weights on the real engine: what serves is what was published, every token says which, and failures change
nothing.
"""

import os
import shutil
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from services.rollout.engines.base import BASE_VERSION, EngineSpec, GenerateRequest, SamplingParams
from services.rollout.engines.sglang_jax.client import open_engine
from shared.errors import EngineDied
from shared.run.checkpoint_files import ManifestLeaf, Probe, read_manifest, write_manifest
from tests.rollout.server import CONTEXT, MAX_PREFILL, MAX_RUNNING, RolloutProcess, wait_until
from tests.support import decoder_reference, models


def push(server: RolloutProcess, version: str, mode: str = "retract") -> dict:
    return server.post(
        "/update_weights", {"manifest": str(server.root / "pushed" / version / "manifest.json"), "mode": mode}
    )


async def test_after_an_update_the_server_equals_a_fresh_one(
    server: RolloutProcess, prompts: list[list[int]], tmp_path: Path
) -> None:
    """The fresh engine loads Hugging Face's format by its own loader and splits the model over two devices; then it is
    killed.
    """
    version = server.new_version()
    server.generate(prompts[0], 8)
    server.publish(version, 1)
    push(server, version)
    mine = [server.generate(p, 16) for p in prompts]
    folder = models.write_hf(tmp_path / "hf", server.config, server.weights[version])
    spec = EngineSpec(
        str(folder),
        tp_size=2,
        max_running_requests=MAX_RUNNING,
        context_length=CONTEXT,
        max_prefill_tokens=MAX_PREFILL,
        token_paddings=(MAX_PREFILL,),
        bs_paddings=(MAX_RUNNING,),
    )
    with pytest.raises(EngineDied):  # noqa: PT012 - leaving the context reports the death as well
        async with open_engine(spec) as engine:
            for prompt, answer in zip(prompts, mine, strict=True):
                sampling = SamplingParams(max_new_tokens=16, temperature=0.0, ignore_eos=True)
                fresh = await engine.generate(GenerateRequest("r", np.array(prompt, np.int32), sampling))
                assert fresh.output_ids.tolist() == answer["output_ids"].tolist()
                np.testing.assert_allclose(fresh.logprobs, answer["meta_info"]["output_token_logprobs"], atol=1e-5)
                assert {s.version for s in fresh.versions} == {BASE_VERSION}
            os.kill(engine.info.pid, signal.SIGKILL)
            await engine.wait_closed()


def test_an_update_reaches_prompts_whose_prefix_was_cached(server: RolloutProcess, prompts: list[list[int]]) -> None:
    """Keys and values of the old weights are of no use to the new ones."""
    server.generate(prompts[0], 8)
    version = server.new_version()
    server.publish(version, 2)
    push(server, version)
    answer = server.generate(prompts[0], 8)
    assert answer["meta_info"]["cached_tokens"] == 0
    assert answer["meta_info"]["weight_versions"] == [{"version": version, "start": 0, "end": 8}]
    assert server.error(prompts[0], answer) <= 1e-4


@pytest.mark.parametrize("mode", ["retract", "abort", "in_place"])
def test_requests_in_flight_say_which_weights_made_each_token(
    server: RolloutProcess, prompts: list[list[int]], mode: str
) -> None:
    """More requests than run at once, so that some are queued when the weights change; of several lengths, so that they
    never end all together, and some are half-way.
    """
    old, new = server.get("/weights")["current"], server.new_version()
    server.publish(new, 3)
    server.post("/weights/stage", {"manifest": str(server.root / "pushed" / new)})
    many = prompts * 2
    before = server.status()
    started = [server.start(p, 90 + 20 * (i % 4)) for i, p in enumerate(many)]
    wait_until(lambda: server.status()["output_tokens"] > before["output_tokens"] + 40 * MAX_RUNNING)
    server.post("/weights/commit", {"version": new, "mode": mode, "base_version": old})
    answers = [f.result() for f in started]
    seen = {tuple(s["version"] for s in a["meta_info"]["weight_versions"]) for a in answers}
    assert (new,) in seen
    assert ((old, new) in seen) == (mode != "abort")
    assert ({a["meta_info"]["finish_reason"]["type"] for a in answers} == {"length"}) == (mode != "abort")
    if mode != "in_place":
        assert max(server.error(p, a) for p, a in [*zip(many, answers, strict=True)][::3]) <= 1e-4
    after = server.generate(prompts[0], 8)
    assert server.error(prompts[0], after) <= 1e-4
    assert server.status()["compilations"] == before["compilations"]


def test_an_update_in_place_keeps_old_keys_from_new_requests(server: RolloutProcess, prompts: list[list[int]]) -> None:
    """They are still in the pool, in use by what runs."""
    version = server.new_version()
    server.publish(version, 4)
    running = server.start(prompts[1], 100)
    server.generate(prompts[0], 8)
    push(server, version, "in_place")
    answer = server.generate(prompts[0], 8)
    assert answer["meta_info"]["cached_tokens"] == 0
    assert server.error(prompts[0], answer) <= 1e-4
    assert len(running.result()["output_ids"]) == 100


def _flip_a_byte(folder: Path) -> None:
    largest = max((f for f in (folder / "params").rglob("*") if f.is_file()), key=lambda f: f.stat().st_size)
    data = bytearray(largest.read_bytes())
    data[len(data) // 2] ^= 1
    largest.write_bytes(data)


def _truncate(folder: Path) -> None:
    largest = max((f for f in (folder / "params").rglob("*") if f.is_file()), key=lambda f: f.stat().st_size)
    largest.write_bytes(largest.read_bytes()[:-100])


def _remove_a_file(folder: Path) -> None:
    next(f for f in (folder / "params").rglob("*") if f.is_file()).unlink()


def _cut_manifest(folder: Path) -> None:
    manifest = folder / "manifest.json"
    manifest.write_bytes(manifest.read_bytes()[:200])


@pytest.fixture
def apart(server: RolloutProcess, tmp_path: Path) -> Path:
    """A folder under the server's root that its watcher does not take for a version."""
    folder = server.root / f"apart-{tmp_path.name}"
    folder.mkdir()
    return folder


@pytest.mark.parametrize("damage", [_flip_a_byte, _truncate, _remove_a_file, _cut_manifest])
def test_a_damaged_checkpoint_is_refused(
    server: RolloutProcess, prompts: list[list[int]], apart: Path, damage: Callable[[Path], None]
) -> None:
    checkpoint = models.write_checkpoint(
        apart, server.new_version(), server.config, models.random_weights(server.config, 9)
    )
    damage(checkpoint)
    refused(server, prompts[0], str(checkpoint), 422)


def test_weights_of_another_shape_are_refused(server: RolloutProcess, prompts: list[list[int]], apart: Path) -> None:
    """Under a manifest of this model, so that it is the arrays that tell."""
    wide = server.config | {"intermediate_size": 256}
    checkpoint = models.write_checkpoint(
        apart, server.new_version(), wide, models.random_weights(wide, 9), model=server.config
    )
    assert "has shape" in refused(server, prompts[0], str(checkpoint), 422)


def test_weights_of_another_model_are_refused(server: RolloutProcess, prompts: list[list[int]], apart: Path) -> None:
    """The same shapes, but other positions: nothing but the manifest could tell."""
    other = server.config | {"rope_theta": 5e6}
    checkpoint = models.write_checkpoint(apart, server.new_version(), other, models.random_weights(other, 9))
    assert "rope_theta" in refused(server, prompts[0], str(checkpoint), 422)


def test_weights_with_another_tree_are_refused(server: RolloutProcess, prompts: list[list[int]], apart: Path) -> None:
    deep = server.config | {"num_hidden_layers": 3}
    checkpoint = models.write_checkpoint(
        apart, server.new_version(), deep, models.random_weights(deep, 9), model=server.config
    )
    assert "layers.2" in refused(server, prompts[0], str(checkpoint), 422)


def test_weights_outside_the_root_are_refused(server: RolloutProcess, prompts: list[list[int]], tmp_path: Path) -> None:
    checkpoint = models.write_checkpoint(
        tmp_path, server.new_version(), server.config, models.random_weights(server.config, 9)
    )
    refused(server, prompts[0], str(checkpoint), 403)
    link = server.root / f"link-{tmp_path.name}"
    link.symlink_to(checkpoint)
    refused(server, prompts[0], str(link), 403)


def test_weights_with_a_wrong_fingerprint_are_refused(
    server: RolloutProcess, prompts: list[list[int]], apart: Path
) -> None:
    weights = models.random_weights(server.config, 5)
    expected = decoder_reference.score(weights, server.config, prompts[0][:1], prompts[0][1:])
    right = Probe(tuple(prompts[0]), tuple(expected.tolist()))
    wrong = Probe(tuple(prompts[0]), tuple((expected - 0.1).tolist()))
    bad = models.write_checkpoint(apart, server.new_version(), server.config, weights, probe=wrong)
    assert "fingerprint" in refused(server, prompts[0], str(bad), 422)
    good = models.write_checkpoint(apart, server.new_version(), server.config, weights, probe=right)
    assert server.post("/weights/stage", {"manifest": str(good)})["staged"] == good.name
    assert server.get("/weights")["staged"] == good.name


@pytest.mark.parametrize("lie", ["shape", "dtype", "missing", "more"])
def test_a_tree_that_is_not_the_manifests_is_refused(
    server: RolloutProcess, prompts: list[list[int]], apart: Path, lie: str
) -> None:
    """The files are whole, and the engine could load them."""
    checkpoint = models.write_checkpoint(
        apart, server.new_version(), server.config, models.random_weights(server.config, 9)
    )
    manifest = read_manifest(checkpoint)
    first, *rest = manifest.tree
    lies = {
        "shape": (replace(first, shape=(*first.shape, 1)), *rest),
        "dtype": (replace(first, dtype="bfloat16"), *rest),
        "missing": tuple(rest),
        "more": (*manifest.tree, ManifestLeaf("layers.0.attn.extra.w", (1,), "float32")),
    }
    write_manifest(checkpoint, replace(manifest, tree=lies[lie]))
    assert "the manifest says" in refused(server, prompts[0], str(checkpoint), 422)


def test_weights_more_precise_than_the_engine_are_refused(
    server: RolloutProcess, prompts: list[list[int]], apart: Path
) -> None:
    """They would be rounded, and be another policy than the trainer's."""
    weights = {k: v.astype(np.float64) for k, v in models.random_weights(server.config, 9).items()}
    checkpoint = models.write_checkpoint(apart, server.new_version(), server.config, weights)
    assert "is float64, but the engine computes with float32" in refused(server, prompts[0], str(checkpoint), 422)


def test_the_weights_of_another_version_under_a_manifest_made_to_fit_are_refused(
    server: RolloutProcess, prompts: list[list[int]], apart: Path
) -> None:
    """Every digest is right; only the fingerprint is that of the weights that were meant."""
    meant, others = (models.random_weights(server.config, seed) for seed in (9, 10))
    probe = Probe(
        tuple(prompts[0]), tuple(decoder_reference.score(meant, server.config, prompts[0][:1], prompts[0][1:]).tolist())
    )
    checkpoint = models.write_checkpoint(apart, server.new_version(), server.config, others, probe=probe)
    assert "fingerprint" in refused(server, prompts[0], str(checkpoint), 422)


def refused(server: RolloutProcess, prompt: list[int], manifest: str, status: int) -> str:
    """The old weights serve on, exactly, and nothing is staged that was not."""
    before = server.get("/weights")
    running = server.start(prompt, 60)
    detail = server.post("/update_weights", {"manifest": manifest, "mode": "retract"}, status)["detail"]
    assert server.get("/weights") in (before, before | {"staged": None})
    answer = running.result()
    assert [s["version"] for s in answer["meta_info"]["weight_versions"]] == [before["current"]]
    assert server.error(prompt, answer) <= 1e-4
    return detail


def test_a_commit_needs_the_right_current_and_staged_versions(server: RolloutProcess, apart: Path) -> None:
    current, version = server.get("/weights")["current"], server.new_version()
    server.publish(version, 6)
    assert "not staged" in server.post("/weights/commit", {"version": version, "mode": "retract"}, 409)["detail"]
    push(server, version)
    wrong_base = {"version": _staged(server, apart), "base_version": current, "mode": "retract"}
    assert f"{version} is serving" in server.post("/weights/commit", wrong_base, 409)["detail"]


def _staged(server: RolloutProcess, folder: Path) -> str:
    version = server.new_version()
    checkpoint = models.write_checkpoint(folder, version, server.config, models.random_weights(server.config, 1))
    return server.post("/weights/stage", {"manifest": str(checkpoint)})["staged"]


def test_a_version_already_serving_is_a_success(server: RolloutProcess) -> None:
    version = server.new_version()
    server.publish(version, 7)
    push(server, version)
    again = push(server, version)
    assert (again["version"], again["previous"]) == (version, version)


def test_a_hugging_face_folder_under_the_root_can_be_loaded(server: RolloutProcess, prompts: list[list[int]]) -> None:
    server.weights["export"] = models.random_weights(server.config, 8)
    models.write_hf(server.root / "export", server.config, server.weights["export"])
    assert server.post("/update_weights_from_disk", {"model_path": str(server.root / "export")})["success"]
    assert server.error(prompts[0], server.generate(prompts[0], 8)) <= 1e-4
    shutil.rmtree(server.root / "export")


def test_a_server_that_missed_a_push_catches_up(server: RolloutProcess, prompts: list[list[int]]) -> None:
    server.epoch += 1
    version = server.new_version()
    server.publish(version, 10, ".")
    wait_until(lambda: server.get("/weights")["current"] == version)
    assert server.error(prompts[0], server.generate(prompts[0], 8)) <= 1e-4
