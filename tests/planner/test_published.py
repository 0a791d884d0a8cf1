"""Published rows: every one is expressed as a job, and a malformed one is refused with file and line."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from plait.core import legal
from plait.core.errors import ConfigError, PlanError
from plait.models.config import flops_per_token
from plait.parallel.layout import model_shape, stage_layers
from plait.planner.published import job_of, memory_rank, notes, rows
from plait.planner.published_rows import GIB

ROW: dict[str, Any] = {
    "id": "somewhere/a",
    "source": "somewhere",
    "model": {
        "name": "llama-x",
        "hidden": 1024,
        "layers": 8,
        "heads": 16,
        "kv_heads": 4,
        "head_dim": 64,
        "ffn": 4096,
        "ffn_kind": "swiglu",
        "vocab": 32000,
        "tied": False,
        "attention": "causal",
        "experts": None,
    },
    "cluster": {
        "device": "H100-80GB-SXM",
        "devices": 16,
        "devices_per_node": 8,
        "intra_GBps": 400,
        "inter_Gbps_per_device": None,
    },
    "layout": {
        "tp": 2,
        "pp": 2,
        "dp": 4,
        "cp": 1,
        "ep": 1,
        "etp": None,
        "vp": 1,
        "zero": 1,
        "hsdp_replicas": None,
        "sequence_parallel": True,
        "schedule": "1f1b",
        "of_no_interest": 3,
    },
    "batch": {"seq": 2048, "global_batch": 32, "micro_batch": 1, "microbatches": 8},
    "precision": "bf16",
    "recompute": "none",
    "flags": {},
    "measured": {"step_time_s": 1.5, "peak_memory_gib": 20.0},
    "assumed": [],
}


def row(**changes: Any) -> dict[str, Any]:
    """`ROW` with ``part__field`` set."""
    found = copy.deepcopy(ROW)
    for name, value in changes.items():
        part, _, field = name.partition("__")
        if field:
            found[part][field] = value
        else:
            found[part] = value
    return found


def write(folder: Path, *lines: object) -> Path:
    file = folder / "rows.jsonl"
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    file.write_text("\n".join(texts) + "\n", encoding="utf-8")
    return file


def test_every_published_row_is_a_legal_job(shared: Path) -> None:
    found = rows(shared / "published" / "published.jsonl")
    assert len(found) > 2000
    # Of each source that says something of its own; all of them would take ten seconds.
    for one in found[:: max(1, len(found) // 300)] + [r for r in found if r.source != "vtrain_a100"][::3]:
        job = job_of(one)
        legal.check(
            job.plan,
            model_shape(job.model),
            world_size=job.world_size,
            global_batch=job.global_batch,
            seq=job.seq,
        )
        assert job.world_size == job.topology.devices == one.cluster["devices"], one.id
        assert job.microbatches == one.batch["microbatches"], one.id
        assert sum(stage_layers(job.model, job.plan)) == one.model["layers"], one.id


def test_a_row_is_read(tmp_path: Path) -> None:
    (found,) = rows(write(tmp_path, row(), ""))
    assert found.step_time == 1.5 and found.peak_memory == 20 * GIB and found.tokens == 32 * 2048
    job = job_of(found)
    assert str(job.plan) == "tp=2 pp=2 dp=4 stages=4,4 zero=1 precision=bf16 sequence_parallel=true"
    assert job.model.num_kv_heads == 4 and job.model.norm == "rmsnorm"
    near, far = job.topology.tiers
    # What the row leaves open is the preset's: 400 Gbit/s.
    assert (near.size, near.bandwidth, far.size, far.bandwidth) == (8, 400e9, 16, 50e9)
    assert job.topology.device.peaks["bf16"] == 989e12
    assert notes(found) == () and memory_rank(found) is None


def test_a_step_time_follows_from_a_rate(tmp_path: Path) -> None:
    one = row(measured={"tokens_per_s_per_device": 4096.0})
    (found,) = rows(write(tmp_path, one))
    assert found.step_time == pytest.approx(32 * 2048 / 4096 / 16)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("{", "rows.jsonl:1: not JSON"),
        ("[1]", "rows.jsonl:1: a row is a JSON object, this is list"),
        ('{"id": "a", "source": "b", "x": NaN}', "NaN is not a number that was measured"),
        (row(id=""), "rows.jsonl:1: id is missing"),
        (row(model=None), "model is missing or no object"),
        (row(model__layers=0), "model.layers=0: expected a whole number of at least 1"),
        (row(model__layers=True), "model.layers=True"),
        (row(model__tied="yes"), "model.tied='yes': expected true or false"),
        (row(model__experts=8), "model.experts=8 without model.top_k"),
        (row(model__mla={"kv_lora": 512}), "model.mla needs kv_lora, qk_nope"),
        (row(cluster__intra_GBps=-1), "cluster.intra_GBps=-1: expected a number above 0 or null"),
        (row(layout__tp=4), "tp x pp x cp x dp = 32, cluster.devices=16"),
        (row(layout__zero=4), "layout.zero=4: expected 0 to 3"),
        (row(batch__microbatches=7), "micro_batch x microbatches x dp = 28, batch.global_batch=32"),
        (row(precision="int3"), "precision='int3' is not one of fp32"),
        (row(recompute="some"), "recompute='some' is not one of none"),
        (row(measured={}), "nothing is measured"),
        (row(measured={"step_time_s": "1"}), "measured.step_time_s='1': expected a number"),
        (row(measured={"step_time_s": 1.0, "tokens_per_s_per_device": 9.0}), "disagree"),
        (row(flags=[1]), "flags is list"),
        (row(assumed="all"), "assumed is no list"),
    ],
)
def test_malformed_rows_are_refused(tmp_path: Path, line: object, says: str) -> None:
    with pytest.raises(ConfigError) as error:
        rows(write(tmp_path, line))
    assert says in str(error.value) and "rows.jsonl" in str(error.value) and "\n" not in str(error.value)


def test_files_without_rows_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no rows"):
        rows(write(tmp_path, ""))
    with pytest.raises(ConfigError, match="nowhere"):
        rows(tmp_path / "nowhere.jsonl")
    with pytest.raises(ConfigError, match=r"rows.jsonl:2: id 'somewhere/a' is that of line 1 too"):
        rows(write(tmp_path, row(), row()))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"layout__schedule": "wave"}, "schedule 'wave' is not one of"),
        ({"model__ffn_kind": "maxout"}, "ffn_kind='maxout' is not one of"),
        ({"model__attention": "linear"}, "attention 'linear' is not one of"),
        ({"cluster__device": "Abacus"}, "device 'Abacus' is unknown"),
        ({"flags": {"layers_per_stage_incl_embedding_and_head": [4, 4]}}, "layers_per_stage"),
    ],
)
def test_what_cannot_be_expressed_says_why(tmp_path: Path, changes: dict[str, Any], says: str) -> None:
    (found,) = rows(write(tmp_path, row(**changes)))
    with pytest.raises((PlanError, ConfigError)) as error:
        job_of(found)
    assert says in str(error.value)


def test_schedules_stages_and_groups_are_the_frameworks(tmp_path: Path) -> None:
    def plan_of(**changes: Any) -> str:
        (found,) = rows(write(tmp_path, row(**changes)))
        return str(job_of(found).plan)

    assert "schedule=zb-h1 stages=" in plan_of(layout__schedule="zb-1p")
    named = {"nearest_handcrafted_schedule": "zb-h2"}
    assert "schedule=zb-h2" in plan_of(layout__schedule="zb-1p", flags=named)
    # The embedding and the head each count as a layer.
    assert "stages=3,5" not in plan_of()
    assert "stages=4,4" in plan_of(flags={"layers_per_stage_incl_embedding_and_head": [5, 5]})
    ends = plan_of(flags={"first_and_last_stage_one_layer_fewer": True})
    assert "stages=4,4" in ends
    # nanotron counts the head's product, and the layer that passes half of all is the first stage's last.
    assert "stages=5,3" in plan_of(source="nanotron_ultrascale")
    assert "virtual=2" in plan_of(layout__schedule="interleaved", layout__vp=2, model__layers=8)
    assert "stages=2,2,2,2" in plan_of(layout__schedule="interleaved", layout__vp=2)
    assert "zero_group=2" in plan_of(layout__hsdp_replicas=2)
    assert "recompute=full" in plan_of(recompute="full")
    assert "precision=fp8" in plan_of(precision="mxfp8")


def test_deepseeks_last_stage_has_what_is_left(shared: Path) -> None:
    found = [one for one in rows(shared / "published" / "published.jsonl") if one.model["name"] == "deepseek-v3"]
    assert found
    for one in found:
        stages = job_of(one).plan.stages
        if stages is not None:
            assert sum(stages) == 61 and max(stages[1:-1], default=stages[0]) == stages[1]


def test_alternating_windows_have_the_same_work(tmp_path: Path) -> None:
    (found,) = rows(write(tmp_path, row(model__attention="causal, alternating sliding window 128 / full")))
    model, seq = job_of(found).model, 2048
    assert model.sliding_window is not None
    (plain,) = rows(write(tmp_path, row()))
    whole = flops_per_token(job_of(plain).model, seq)
    dims = 6.0 * model.num_heads * 2 * model.head_dim * model.num_layers
    # A full layer sees (seq + 1) / 2 keys in the mean, one with a window of 128 not quite 128.
    saved = dims * ((seq + 1) / 2 - ((seq + 1) / 2 + 128 - 128 * 127 / (2 * seq)) / 2)
    assert whole - flops_per_token(model, seq) == pytest.approx(saved, rel=0.02)
    assert notes(found) == ("alternating windows as one window in every layer that sees as many keys",)


def test_windows_and_gates_of_other_models(tmp_path: Path) -> None:
    def model_of(**changes: Any) -> Any:
        (found,) = rows(write(tmp_path, row(**changes)))
        return job_of(found).model

    assert model_of(model__attention="causal, sliding window 512").sliding_window == 512
    assert model_of(model__attention="causal, sliding window 4096").sliding_window is None, "wider than a sample"
    assert model_of(model__ffn_kind="geglu") == model_of(model__ffn_kind="swiglu")


def test_a_source_that_is_not_known_goes_by_its_framework(tmp_path: Path) -> None:
    for framework, want in (
        ("torchtitan 0.2", "torchtitan"),
        ("FSDP2", "fsdp"),
        ("Megatron-DeepSpeed", "megatron-deepspeed"),
        ("DeepSpeed 0.14", "deepspeed"),
        ("", "megatron"),
    ):
        (found,) = rows(write(tmp_path, row(flags={"framework": framework})))
        assert job_of(found).practice.framework == want


def test_a_row_says_what_attention_it_ran(tmp_path: Path) -> None:
    for said, want in (("unfused masked softmax", "unfused"), ("flash-attn 2", "flash"), ("", "flash")):
        (found,) = rows(write(tmp_path, row(flags={"attn_impl": said})))
        assert job_of(found).practice.attention == want
