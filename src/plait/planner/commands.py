"""``plait plan`` and ``plait simulate``: from the words of a command line to tables, JSON and files."""

from __future__ import annotations

import json
import shlex
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from plait.core.errors import ConfigError, PlanError
from plait.core.events import chrome_trace
from plait.core.fields import counted, nearest_names, typed
from plait.core.legal import check
from plait.core.plan import Plan
from plait.core.sections import MODEL_FIELDS
from plait.core.topology import Topology
from plait.models.config import PRESETS, ModelConfig
from plait.models.families import from_hf
from plait.parallel.layout import model_shape
from plait.planner import picture, show
from plait.planner.clusters import cluster
from plait.planner.cost import predict, timeline
from plait.planner.given import require_possible
from plait.planner.job import Job
from plait.planner.local import doubt, practice
from plait.planner.mapping import order
from plait.planner.memory import memory
from plait.planner.search import search
from plait.planner.space import Request
from plait.planner.why import Candidate

_EVENTS = 200_000
"""Events of a timeline that is drawn or written: more make a picture of nothing."""


def model_named(text: str) -> ModelConfig:
    """A preset, a Hugging Face folder or its ``config.json``, or a TOML of a model's fields.

    A TOML may hold them in a ``[model]`` table, with ``preset`` for those it does not give. ConfigError says what was
    looked for, and what is wrong in the file.
    """
    if text in PRESETS:
        return PRESETS[text]
    path = Path(text)
    if path.is_dir():
        path = path / "config.json"
    if not path.is_file():
        known = nearest_names(text, PRESETS)
        raise ConfigError(f"model {text!r} is neither a preset ({known}) nor a file or folder")
    try:
        read = path.read_text(encoding="utf-8")
        if path.suffix == ".json":
            return from_hf(json.loads(read))
        table: Any = tomllib.loads(read)
        return _of_table(table.get("model", table))
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise ConfigError(f"model {path}: {error}") from error


def _of_table(table: object) -> ModelConfig:
    if not isinstance(table, Mapping):
        raise ValueError(f"model = {table!r}: expected a table [model]")
    preset = table.get("preset")
    if preset is not None and preset not in PRESETS:
        raise ValueError(f"preset {preset!r} is unknown; {nearest_names(str(preset), PRESETS)}")
    base = PRESETS[preset].to_mapping() if preset is not None else {}
    given = {
        name: typed(MODEL_FIELDS[name][0], value, f"[model] {name}") if name in MODEL_FIELDS else value
        for name, value in table.items()
        if name != "preset"
    }
    return ModelConfig.from_mapping({**base, **given})


def fixed(words: Sequence[str]) -> dict[str, object]:
    """``["tp=8", "zero=1"]`` as plan keys; ConfigError names an unknown key or a wrong value."""
    plan = Plan.parse(" ".join(words))
    names = [word.partition("=")[0] for word in shlex.split(" ".join(words))]
    return {name: getattr(plan, name) for name in names}


def plan_command(
    *,
    model: str,
    cluster_name: str,
    gpus: int,
    seq: int,
    global_batch: int,
    precision: str = "bf16",
    fix: Sequence[str] = (),
    max_memory: float = 0.9,
    top: int = 10,
    as_json: bool = False,
    output: Path | None = None,
    console: Console | None = None,
) -> int:
    """Search, print the ranking, and write the best plan to ``output``. PlanError where nothing fits."""
    given, topology = fixed(fix), cluster(cluster_name, gpus)
    found = search(
        model_named(model),
        topology,
        world_size=gpus,
        seq=seq,
        global_batch=global_batch,
        precision=str(given.get("precision", precision)),
        fix=given,
        max_memory=max_memory,
        top=top,
        practice=practice(topology),
    )
    places = () if found.best is None else _places(topology, found.best.plan, gpus)
    if as_json:
        said = {"devices": list(places), "doubt": doubt(topology)}
        print(json.dumps({**show.search_json(found), **said}, indent=1))
    if found.best is None:
        raise PlanError(f"no plan for {counted(gpus, 'device')} fits into their memory; " + "; ".join(found.advice))
    if not as_json:
        out = console or Console(highlight=False)
        out.print(show.search_page(found))
        if places:
            out.print(_devices(places))
        if doubt(topology):
            out.print(f"{cluster_name}: {doubt(topology)}")
    if output is not None:
        words = [
            f"plait plan --model {shlex.quote(model)} --cluster {shlex.quote(cluster_name)} --gpus {gpus} --seq {seq} "
            f"--global-batch {global_batch}",
        ]
        _write(output, show.plan_toml(found.best, [*words, _devices(places)] if places else words))
    return 0


def _places(topology: Topology, plan: Plan, ranks: int) -> tuple[int, ...]:
    """Device of each rank, by the links that were measured; none where ranks in order are as well off."""
    if len(topology.measured.links) < ranks:
        return ()
    found = order(topology.measured.links, plan.mesh(ranks))
    return () if found == tuple(range(ranks)) else found


def _devices(places: Sequence[int]) -> str:
    return "by the measured links, start ranks in this order of devices: " + " ".join(map(str, places))


def simulate_command(
    path: Path,
    *,
    model: str,
    cluster_name: str,
    seq: int,
    global_batch: int,
    gpus: int | None = None,
    as_json: bool = False,
    trace: Path | None = None,
    svg: Path | None = None,
    console: Console | None = None,
) -> int:
    """Print one plan in detail with its timeline; ``trace`` (Perfetto JSON) and ``svg`` are files to write."""
    plan = read_plan(path)
    size = gpus if gpus is not None else plan.tp * plan.pp * plan.cp * (plan.dp or 1)
    job = _job(plan, model_named(model), cluster_name, size, seq, global_batch)
    prediction, held = predict(job), memory(job)
    drawable = 3 * job.microbatches * plan.stage_count <= _EVENTS
    if not drawable and (trace is not None or svg is not None):
        raise ConfigError(
            f"a timeline of {job.microbatches} microbatches x {plan.stage_count} stages is too long to draw; what "
            f"works: a global batch of {max(1, global_batch // 10)} or less"
        )
    events = timeline(job) if drawable else []
    if as_json:
        print(json.dumps(show.candidate_json(Candidate(plan=plan, prediction=prediction, memory=held)), indent=1))
    else:
        out = console or Console(highlight=False)
        out.print(show.job_page(job, prediction, held))
        if doubt(job.topology):
            out.print(f"{cluster_name}: {doubt(job.topology)}")
        if events:
            out.print(picture.terminal(events, width=out.width))
    if trace is not None:
        _write(trace, json.dumps(chrome_trace(events)))
    if svg is not None:
        _write(svg, picture.svg(events, title=f"{model} on {size} x {cluster_name}: {job.plan}"))
    return 0


def _job(plan: Plan, model: ModelConfig, cluster_name: str, size: int, seq: int, global_batch: int) -> Job:
    """The job, checked by the rule table."""
    topology = cluster(cluster_name, size)
    request = Request(
        model=model,
        topology=topology,
        world_size=size,
        seq=seq,
        global_batch=global_batch,
        precision=plan.precision,
        practice=practice(topology),
    )
    check(plan, model_shape(model), world_size=size, global_batch=global_batch, seq=seq)
    require_possible(request)
    return request.job(plan.resolve(size))


def read_plan(path: Path) -> Plan:
    """The plan in a TOML file: the body of a ``[plan]`` table, or a file that has one."""
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"plan {path}: {error.strerror}") from error
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"plan {path}: not valid TOML: {error}") from error
    inner = tables.get("plan", tables)
    if not isinstance(inner, dict):
        raise ConfigError(f"plan {path}: plan is no table")
    return Plan.from_mapping(inner)


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}") from error
