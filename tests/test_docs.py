"""The documentation is held to the code: generated parts, commands, code blocks, links, formulas, dependencies."""

from __future__ import annotations

import re
import shlex
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
from docs.generate import BLOCKS, named, pages, refreshed

from plait.arguments import parser
from plait.core.config import load
from plait.core.plan import Plan
from plait.models.config import ModelConfig, parameter_count
from plait.models.decoder import Decoder
from plait.models.init import InitSource
from plait.parallel.apply import parallelize
from tests.parallel.cuts import GLOBAL_BATCH, SEQ, count, global_batch, microbatches, models
from tests.pool import Connect, Pool

ROOT = Path(__file__).resolve().parents[1]
PAGES = [page.relative_to(ROOT).as_posix() for page in pages()]
_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")


def _read(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def _blocks(page: str, language: str) -> list[str]:
    return [body for kind, body in _FENCE.findall(_read(page)) if kind == language]


def _prose(page: str) -> str:
    return _FENCE.sub("", _read(page))


def _anchors(page: str) -> set[str]:
    """GitHub's anchors of a page's headings."""
    heads = re.findall(r"^#+ (.+)$", _prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


@pytest.mark.parametrize("page", PAGES)
def test_generated_parts_are_fresh(page: str) -> None:
    assert refreshed(_read(page)) == _read(page), f"{page} is stale: run python -m docs.generate"


def test_every_generated_part_is_on_a_page() -> None:
    assert sorted(name for page in PAGES for name in named(_read(page))) == sorted(BLOCKS)


def test_a_stale_part_is_noticed() -> None:
    text = "a\n<!-- generated: wire -->\nold\n<!-- /generated -->\nb\n"
    fresh = refreshed(text)
    assert fresh != text
    assert "| send | 1 |" in fresh
    assert refreshed(fresh) == fresh


def _commands() -> list[tuple[str, str]]:
    found = []
    for page in PAGES:
        for block in _blocks(page, "sh"):
            for line in block.replace("\\\n", " ").splitlines():
                for part in line.partition("#")[0].split("&&"):
                    words = part.strip()
                    if words.startswith("plait "):
                        found.append((page, words))
    for path in sorted((ROOT / "examples").iterdir()):
        text = path.read_text(encoding="utf-8")
        for words in re.findall(r"^#[ \w./-]*?(plait (?:train|verify|convert) .+)$", text, re.MULTILINE):
            found.append((f"examples/{path.name}", re.split(r" {2,}#|`", words)[0]))
    return found


@pytest.mark.parametrize(("page", "command"), _commands())
def test_commands_parse_and_their_keys_are_known(page: str, command: str) -> None:
    given = parser().parse_args(shlex.split(command)[1:])
    if given.command in ("train", "verify") and getattr(given, "resume", None) is None:
        load(None if given.run is None else ROOT / given.run, given.set)


def test_the_readme_has_commands() -> None:
    assert len([command for page, command in _commands() if page == "README.md"]) >= 4


@pytest.mark.parametrize("page", PAGES)
def test_python_blocks_compile(page: str) -> None:
    for number, block in enumerate(_blocks(page, "python")):
        compile(block, f"{page} block {number}", "exec")


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    for target in _LINK.findall(_prose(page)):
        if target.startswith(("http://", "https://")):
            continue
        file, _, anchor = target.partition("#")
        path = (ROOT / page).parent / file if file else ROOT / page
        assert path.exists(), f"{page} links to {target}"
        if anchor:
            assert anchor in _anchors(path.resolve().relative_to(ROOT).as_posix()), f"{page} links to {target}"


def test_every_dependency_has_its_line() -> None:
    project = tomllib.loads(_read("pyproject.toml"))["project"]
    wanted = [*project["dependencies"], *project["optional-dependencies"]["test"]]
    names = {re.split(r"[^\w-]", requirement)[0] for requirement in wanted}
    assert names == set(re.findall(r"^\| `([\w-]+)` \|", _read("docs/dependencies.md"), re.MULTILINE))


def test_ci_runs_the_readmes_test_command() -> None:
    (command,) = [line for block in _blocks("README.md", "sh") for line in block.splitlines() if "pytest" in line]
    assert any(line.startswith(command) for line in _read(".ci/run").splitlines())


Booked = dict[tuple[str, str, str], int]


def _booked(connect: Connect, text: str, config: ModelConfig, ranks: int) -> tuple[Booked, dict[str, int], int]:
    """What rank 0 sends in a step, by (axis, operation, phase); the bytes it holds; and its flat length."""
    plan = Plan.parse(text).resolve(ranks)
    world = connect(plan.mesh(ranks))
    with torch.device("meta"):
        model = Decoder(config, seed=7)
    parallel = parallelize(model, plan, world, weights=InitSource(config, 3))
    batch = global_batch(config, 0)
    world.book.ledger.clear()
    parallel.forward_backward(microbatches(batch, plan, world.at["dp"]), count(batch))
    parallel.zero.publish()
    flat = sum(bucket.grads.numel() for bucket in parallel.zero.buckets)
    return dict(world.book.ledger.bytes), dict(parallel.zero.state_bytes()), flat


def _run(pool: Pool, text: str, config: ModelConfig, ranks: int) -> tuple[Booked, dict[str, int], int]:
    first: Any = pool.run(ranks, _booked, text, config, ranks)[0]
    return first


def _sent(booked: Booked, axis: str, phases: str) -> int:
    return sum(sent for (on, _, phase), sent in booked.items() if on == axis and phase in list(phases))


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("sequence", ["true", "false"])
def test_bytes_of_tensor_parallel_are_those_of_the_page(pool: Pool, sequence: str, recompute: str) -> None:
    """docs/parallelism.md, the two tables of bytes, and the line on recomputation; t=2, one microbatch."""
    config = models()["llama"]
    text = f"tp=2 micro={GLOBAL_BATCH} sequence_parallel={sequence} recompute={recompute}"
    booked, _, _ = _run(pool, text, config, 2)
    rows = GLOBAL_BATCH * SEQ
    hidden = rows * config.hidden_size * 4
    layer, embedding, head = (10, 2, 3) if sequence == "true" else (8, 2, 2)
    if recompute == "full":
        layer += 4
    loss = 2 * 12 * rows
    assert _sent(booked, "tp", "FB") == ((layer * config.num_layers + embedding + head) * hidden + loss) // 2


@pytest.mark.parametrize("text", ["dp=2 micro=4", "dp=2 micro=4 precision=bf16"])
@pytest.mark.parametrize("level", [0, 1])
def test_bytes_and_memory_of_zero_are_those_of_the_page(pool: Pool, level: int, text: str) -> None:
    config = models()["llama"]
    booked, held, flat = _run(pool, f"{text} zero={level}", config, 2)
    size = 2 if "bf16" in text else 4
    assert flat >= parameter_count(config)
    gradients, weights = 4 * flat, size * flat
    sent = _sent(booked, "dp+cp", "B") + booked.get(("dp+cp", "all_gather", "step"), 0)
    assert sent == (2 * gradients // 2 if level == 0 else (gradients + weights) // 2)
    optimizer = (8 if size == 4 else 12) * flat // (1 if level == 0 else 2)
    assert held == {"weights": weights, "gradients": gradients, "optimizer": optimizer}


@pytest.mark.parametrize(("text", "ranks", "cut"), [("pp=2 micro=2", 2, 1), ("pp=2 tp=2 micro=2", 4, 2)])
def test_bytes_of_a_pipeline_boundary_are_those_of_the_page(pool: Pool, text: str, ranks: int, cut: int) -> None:
    config = models()["llama"]
    booked, _, _ = _run(pool, text, config, ranks)
    assert booked["pp", "send", "F"] == GLOBAL_BATCH * SEQ * config.hidden_size * 4 // cut
