"""Megatron-core on the benchmark model, on CPU with gloo, where it is installed.

    pip install megatron-core

``python benchmarks/peers_megatron.py --check`` runs it beside one process.
"""

from __future__ import annotations

import importlib.util
import sys
import types
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench_model import BenchConfig
from engine import Engine, Update, microbatches, named, unmasked
from engine_check import main
from peers_pipeline import cut
from peers_torch import Linear


def megatron_on_cpu() -> None:
    """Points the CUDA devices that Megatron-core's layers and schedules name at the CPU (twice is harmless)."""
    from megatron.core.pipeline_parallel import schedules

    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment, return-value]
    proxy = types.ModuleType("torch")
    proxy.__dict__.update(torch.__dict__)

    def zeros(*size: Any, dtype: torch.dtype | None = None, device: str | None = None) -> Tensor:
        return torch.zeros(*size, dtype=dtype)

    proxy.__dict__["zeros"] = zeros  # schedules.py asks for its token counters on device="cuda"
    schedules.torch = proxy


class SdpaAttention(nn.Module):
    """Megatron-core's core attention by torch's fused kernel: its own local one multiplies out all scores, and the
    fused one that it otherwise uses (Transformer Engine) needs a GPU. Constructor and call as Megatron-core makes them.
    """

    def __init__(
        self, config: Any, layer_number: int, attn_mask_type: Any, attention_type: str, **settings: Any
    ) -> None:
        super().__init__()

    def forward(self, query_THE: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **_: Any) -> Tensor:
        q, k, v = (x.permute(1, 2, 0, 3) for x in (query_THE, key, value))  # [T, B, H, E] -> [B, H, T, E]
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return out.permute(2, 0, 1, 3).flatten(2)


def megatron_config(config: BenchConfig, tp: int, pp: int) -> Any:
    from megatron.core.transformer.transformer_config import TransformerConfig

    stages: dict[str, int] = {}
    if pp == 2:  # the same balanced cut as torch's pipeline
        first, last = cut(config.layers, 2)
        stages = {"num_layers_in_first_pipeline_stage": len(first), "num_layers_in_last_pipeline_stage": len(last)}
    return TransformerConfig(
        num_layers=config.layers,
        hidden_size=config.hidden,
        num_attention_heads=config.heads,
        num_query_groups=config.kv_heads,
        ffn_hidden_size=config.ffn,
        normalization="RMSNorm",
        layernorm_epsilon=config.norm_eps,
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        pipeline_dtype=torch.float32,
        params_dtype=torch.float32,
        batch_p2p_sync=False,
        deallocate_pipeline_outputs=True,
        use_cpu_initialization=True,
        perform_initialization=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
        persist_layer_norm=False,
        gradient_accumulation_fusion=False,
        **stages,
    )


class Megatron(Engine):
    """Megatron-core's GPTModel: tensor parallel (vocabulary-parallel loss), 1F1B pipeline, or both.

    Sequence parallelism is left out: Megatron-core refuses it with torch's RMSNorm, and its own norms need a GPU.
    """

    def __init__(self, config: BenchConfig, tp: int = 1, pp: int = 1, microbatches: int = 1) -> None:
        super().__init__(config)
        self.tp, self.pp, self.microbatches, self.ranks = tp, pp, microbatches, tp * pp
        cuts = " x ".join(f"{axis}{size}" for axis, size in (("tp", tp), ("pp", pp)) if size > 1)
        self.name = named(f"megatron-core {cuts}", microbatches)

    def setup(self, rank: int, world_size: int, weights: Mapping[str, Tensor]) -> None:
        self.require(world_size)
        megatron_on_cpu()
        from megatron.core import parallel_state
        from megatron.core.models.gpt import GPTModel
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

        if parallel_state.model_parallel_is_initialized():
            parallel_state.destroy_model_parallel()
        parallel_state.initialize_model_parallel(self.tp, self.pp)
        self.group = parallel_state.get_tensor_model_parallel_group()
        self.first, self.last = (
            parallel_state.is_pipeline_first_stage(),
            parallel_state.is_pipeline_last_stage(),
        )
        spec = get_gpt_layer_local_spec(normalization="RMSNorm")
        spec.submodules.self_attention.submodules.core_attention = SdpaAttention
        self.model = GPTModel(
            config=megatron_config(self.config, self.tp, self.pp),
            transformer_layer_spec=spec,
            vocab_size=self.config.vocab,
            max_sequence_length=self.config.seq,
            pre_process=self.first,
            post_process=self.last,
            position_embedding_type="rope",
            rotary_base=int(self.config.rope_theta),
            share_embeddings_and_output_weights=False,
        )
        self.load(weights)
        # Norm weights are the same on all ranks of the tensor-parallel group; everything else is cut.
        self.update = Update((p, self.tp if p.ndim == 1 else 1) for p in self.model.parameters())

    @torch.no_grad()
    def load(self, weights: Mapping[str, Tensor]) -> None:
        """Copies this rank's part of plait-named weights; Megatron-core groups q, k and v by KV head."""
        c, rank = self.config, self.group.rank()
        group = c.heads // c.kv_heads

        def part(full: Tensor, dim: int = 0) -> Tensor:
            return full.chunk(self.tp, dim)[rank]

        if self.first:
            self.model.embedding.word_embeddings.weight.copy_(part(weights["embed.tokens.weight"]))
        for layer in self.model.decoder.layers:
            name = f"layers.{layer.layer_number - 1}"
            heads = weights[f"{name}.attn.qkv.weight"].unflatten(0, (-1, c.head_dim))
            q, k, v = heads.split([c.heads, c.kv_heads, c.kv_heads])
            grouped = torch.cat([q.unflatten(0, (-1, group)), k[:, None], v[:, None]], dim=1)
            layer.self_attention.linear_qkv.weight.copy_(part(grouped).flatten(0, 2))
            layer.self_attention.linear_proj.weight.copy_(part(weights[f"{name}.attn.out.weight"], 1))
            gate, up = weights[f"{name}.mlp.gate_up.weight"].chunk(2)
            layer.mlp.linear_fc1.weight.copy_(torch.cat([part(gate), part(up)]))
            layer.mlp.linear_fc2.weight.copy_(part(weights[f"{name}.mlp.down.weight"], 1))
            layer.input_layernorm.weight.copy_(weights[f"{name}.norm1.weight"])
            layer.pre_mlp_layernorm.weight.copy_(weights[f"{name}.norm2.weight"])
        if self.last:
            self.model.decoder.final_layernorm.weight.copy_(weights["norm.weight"])
            self.model.output_layer.weight.copy_(part(weights["head.weight"]))

    def step(self, tokens_BT: Tensor, targets_BT: Tensor) -> float:
        from megatron.core.pipeline_parallel import get_forward_backward_func

        count = unmasked(targets_BT)
        positions_BT = torch.arange(tokens_BT.shape[1]).expand(tokens_BT.shape[0] // self.microbatches, -1)

        def loss_of(losses_BT: Tensor) -> tuple[Tensor, Tensor]:
            loss = losses_BT.sum() / count
            return loss * self.microbatches, loss.detach()  # the schedule divides by the number of microbatches

        def forward(batches: Iterator[tuple[Tensor, Tensor]], model: Any) -> tuple[Tensor, Any]:
            tokens, targets = next(batches)
            labels = targets if self.last else None
            return model(tokens, positions_BT, None, labels=labels), loss_of

        losses = get_forward_backward_func()(
            forward_step_func=forward,
            data_iterator=microbatches(tokens_BT, targets_BT, self.microbatches),
            model=[self.model],
            num_microbatches=self.microbatches,
            seq_length=tokens_BT.shape[1],
            micro_batch_size=tokens_BT.shape[0] // self.microbatches,
        )
        total = sum(loss.item() for loss in losses) if self.last else 0.0
        return self.finish(total / self.tp)


def engines(config: BenchConfig) -> list[Engine]:
    """One process, and Megatron-core where it is installed (a line on standard error where not)."""
    found: list[Engine] = [Linear(config, threads=1)]
    if importlib.util.find_spec("megatron") is None:
        print("megatron-core is not installed: its rows are left out (pip install megatron-core)", file=sys.stderr)
        return found
    found += [Megatron(config, tp=2), Megatron(config, tp=2, microbatches=4)]
    found += [Megatron(config, pp=2, microbatches=m) for m in (4, 8)]
    return found + [Megatron(config, tp=2, pp=2, microbatches=m) for m in (4, 8)]


if __name__ == "__main__":
    sys.exit(main(engines, __doc__))
