"""DeepSpeed ZeRO-1 and Megatron-core on the benchmark model, on CPU with gloo; each joins where it is installed.

    pip install deepspeed           # DS_BUILD_OPS=0: nothing of it has to be compiled for ZeRO-1
    pip install megatron-core

``python benchmarks/peers_other.py --check`` runs them beside one process. ``engines`` leaves out what cannot be
imported and says so on standard error.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import types
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from bench_model import BenchConfig, BenchModel, token_loss
from engine import BETAS, CLIP, LEARNING_RATE, WEIGHT_DECAY, Engine, Update, microbatches, named, unmasked
from engine_check import main
from peers_torch import Linear, cut


class DeepSpeed(Engine):
    """DeepSpeed ZeRO-1, dp=2, with torch's fused AdamW over its flat partitions and its own clipping."""

    ranks = 2

    def __init__(self, config: BenchConfig, microbatches: int = 1) -> None:
        super().__init__(config)
        self.name, self.microbatches = named("deepspeed zero-1", microbatches), microbatches

    def setup(self, rank: int, world_size: int, weights: Mapping[str, Tensor]) -> None:
        self.require(world_size)
        os.environ["DS_ACCELERATOR"] = "cpu"
        # Read by DeepSpeed's CPU accelerator in place of its launcher; LOCAL_SIZE also by its communication layer.
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(rank), LOCAL_SIZE=str(world_size))
        import deepspeed

        # Only its inference uses the shared-memory all-reduce, which would be compiled here, for minutes, under a lock.
        # (import_module, because the attribute deepspeed.comm.torch is torch itself.)
        importlib.import_module("deepspeed.comm.torch").__dict__["build_shm_op"] = lambda: None
        self.rank, self.world_size = rank, world_size
        deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False, verbose=False)
        model = BenchModel(self.config)
        model.load(weights)
        groups = [
            {"params": [p for p in model.parameters() if p.ndim >= 2], "weight_decay": WEIGHT_DECAY},
            {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0},
        ]
        micro = self.config.batch // world_size // self.microbatches
        settings = {
            "train_batch_size": self.config.batch,
            "train_micro_batch_size_per_gpu": micro,
            "gradient_accumulation_steps": self.microbatches,
            "gradient_clipping": CLIP,
            "zero_optimization": {"stage": 1, "overlap_comm": False, "contiguous_gradients": True},
            "zero_allow_untested_optimizer": True,
            "steps_per_print": 10**9,
        }
        optimizer = torch.optim.AdamW(groups, lr=LEARNING_RATE, betas=BETAS, fused=True)
        self.engine, *_ = deepspeed.initialize(
            model=model, optimizer=optimizer, config=settings, dist_init_required=False
        )

    def step(self, tokens_BT: Tensor, targets_BT: Tensor) -> float:
        count, total = unmasked(targets_BT), torch.zeros((), dtype=torch.float64)
        tokens, targets = tokens_BT.chunk(self.world_size)[self.rank], targets_BT.chunk(self.world_size)[self.rank]
        for micro_tokens, micro_targets in microbatches(tokens, targets, self.microbatches):
            # DeepSpeed averages over ranks and microbatches: the factor turns that into the sum of the shares.
            loss = token_loss(self.engine(micro_tokens), micro_targets) / count
            self.engine.backward(loss * (self.world_size * self.microbatches))
            self.engine.step()
            total += loss.detach()
        dist.all_reduce(total)
        self.grad_norm = float(self.engine.get_global_grad_norm())
        return total.item()


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
    """One process, and every engine whose package is installed; a line on standard error for each that is not."""
    found: list[Engine] = [Linear(config, threads=1)]
    if importlib.util.find_spec("deepspeed") is not None:
        found += [DeepSpeed(config), DeepSpeed(config, microbatches=2)]
    else:
        print("deepspeed is not installed: its rows are left out (pip install deepspeed)", file=sys.stderr)
    if importlib.util.find_spec("megatron") is not None:
        found += [Megatron(config, tp=2), Megatron(config, tp=2, microbatches=4)]
        found += [Megatron(config, pp=2, microbatches=m) for m in (4, 8)]
        found += [Megatron(config, tp=2, pp=2, microbatches=m) for m in (4, 8)]
    else:
        print("megatron-core is not installed: its rows are left out (pip install megatron-core)", file=sys.stderr)
    return found


if __name__ == "__main__":
    sys.exit(main(engines, __doc__))
