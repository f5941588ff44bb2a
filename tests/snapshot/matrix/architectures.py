"""A small configuration for every architecture in the installed mlx-lm's model folder, and the networks built of them.

Each has at least one layer of every type that its architecture mixes, and windows and chunks short enough that a few
hundred tokens are past them. What most architectures call by the same name stands once, in `_COMMON`; every
architecture's own `ModelArgs.from_dict` takes of it what it knows.
"""

from __future__ import annotations

import ast
import importlib
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torpor.snapshot  # noqa: F401  # chooses the BLAS before MLX is imported
from blake3 import blake3

import mlx.core as mx  # isort: skip
import mlx.nn as nn
import mlx_lm.models
from mlx.utils import tree_flatten, tree_map_with_path, tree_unflatten
from mlx_lm.models.cache import ConcatenateKVCache, KVCache, QuantizedKVCache, make_prompt_cache
from mlx_lm.models.switch_layers import SwitchLinear

VOCABULARY = 256
WINDOW = 64
MODELS_FOLDER = Path(mlx_lm.models.__path__[0])
DTYPES = {"float32": mx.float32, "bfloat16": mx.bfloat16}
SEED = 0

# Embeddings and heads, by their names in the architectures.
_TABLES = re.compile("embed|wte|wpe|lm_head")
# MLX has no bfloat16 product of gathered matrices on a CPU, only a quantized one.
_EXPERT_BITS = {"group_size": 32, "bits": 8}

_SLIDING_THEN_FULL = ["sliding_attention", "full_attention"]
_TWO_ROPES = {
    "full_attention": {"rope_type": "default", "rope_theta": 10000.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1000.0},
}

_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-6,
    "layer_norm_eps": 1e-5,
    "layer_norm_epsilon": 1e-5,
    "norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "partial_rotary_factor": 0.5,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
    "use_bias": False,
    "use_qk_norm": True,
    "sliding_window": WINDOW,
    # Mixtures of experts: the first layer dense, the second sparse.
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "num_shared_experts": 1,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "shared_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "mlp_only_layers": [0],
    "decoder_sparse_step": 1,
    "moe_layer_freq": 1,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.0,
    # Latent attention.
    "kv_lora_rank": 32,
    "q_lora_rank": 32,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    # Attention to what an indexer picks.
    "index_n_heads": 2,
    "index_head_dim": 16,
    "index_topk": 32,
    # Multipliers of the Granite and MiniCPM families.
    "logits_scaling": 1.0,
    "attention_multiplier": 0.25,
    "embedding_multiplier": 2.0,
    "residual_multiplier": 0.7,
    "dim_model_base": 32,
    "scale_depth": 1.4,
    "scale_emb": 4.0,
    # Recurrent layers.
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
    "linear_allow_neg_eigval": True,
    "conv_kernel": 4,
    "use_conv_bias": True,
    "conv_bias": True,
    "conv_L_cache": 3,
    "state_size": 16,
    "ssm_state_size": 16,
    "n_groups": 1,
    "time_step_limit": (0.001, 100.0),
    "mamba_proj_bias": False,
    "mamba_conv_bias": True,
    "mamba_d_conv": 4,
    "mamba_d_state": 16,
    "mamba_expand": 2,
    "mamba_n_groups": 1,
}

_MLA_MOE: dict[str, Any] = {"num_key_value_heads": 4, "topk_method": "noaux_tc", "scoring_func": "sigmoid"}
_LINEAR_ATTENTION = {
    "kda_layers": [1],
    "full_attn_layers": [2],
    "num_heads": 2,
    "head_dim": 32,
    "short_conv_kernel_size": 4,
    "gate_lower_bound": -5.0,
}
_KIMI_LINEAR = {**_MLA_MOE, "linear_attn_config": _LINEAR_ATTENTION, "num_experts_per_token": 2}
_LONGCAT = {
    "attention_method": "MLA",
    "zero_expert_type": "identity",
    "ffn_hidden_size": 96,
    "moe_topk": 2,
    "expert_ffn_hidden_size": 32,
    "zero_expert_num": 2,
    "num_layers": 2,
    "mla_scale_q_lora": True,
    "mla_scale_kv_lora": True,
}
_GEMMA3 = {"sliding_window_pattern": 2, "query_pre_attn_scalar": 16}
_GEMMA3N = {
    "num_hidden_layers": 4,
    "num_kv_shared_layers": 2,
    "vocab_size_per_layer_input": VOCABULARY,
    "rope_local_base_freq": 1000.0,
    "final_logit_softcapping": 30.0,
    "layer_types": _SLIDING_THEN_FULL * 2,
    "activation_sparsity_pattern": [0.5, 0.0, 0.0, 0.0],
    "hidden_size_per_layer_input": 16,
    "altup_num_inputs": 2,
    "altup_coef_clip": 120.0,
    "altup_correct_scale": True,
    "altup_active_idx": 0,
    "laurel_rank": 8,
    "intermediate_size": [96] * 4,
}
_GEMMA4 = {
    "num_hidden_layers": 4,
    "num_kv_shared_layers": 2,
    "layer_types": _SLIDING_THEN_FULL * 2,
    "global_head_dim": 32,
    "vocab_size_per_layer_input": VOCABULARY,
    "hidden_size_per_layer_input": 16,
}
_LFM2 = {
    "num_dense_layers": 1,
    "use_expert_bias": True,
    "block_dim": 64,
    "block_multiple_of": 16,
    "block_ffn_dim_multiplier": 1.0,
    "block_auto_adjust_ff_dim": False,
    "full_attn_idxs": [1],
}
_LLAMA4 = {
    "num_hidden_layers": 4,
    "attention_chunk_size": WINDOW,
    "interleave_moe_layer_step": 2,
    "num_experts_per_tok": 1,
    "intermediate_size_mlp": 96,
    "model_type": "llama4_text",
}
_QWEN35 = {
    "full_attention_interval": 2,
    "num_experts": 0,
    "rope_parameters": {"type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
}
_QWEN35_MOE = {**_QWEN35, "num_experts": 4}
_LLAMA4_SCALED_ROPE = {
    "type": "default",
    "rope_theta": 10000.0,
    "llama_4_scaling_beta": 0.1,
    "original_max_position_embeddings": 128,
}
_MINISTRAL3 = {"layer_types": _SLIDING_THEN_FULL, "rope_parameters": _LLAMA4_SCALED_ROPE}

# The masks of mlx_lm.models.olmo fit a single token only.
_CHUNKS = {"olmo": 1}

# Those that need nothing beside it.
_AS_COMMON = (
    *("Klear", "bailing_moe", "bitnet", "cohere", "deepseek", "dots1", "ernie4_5", "gemma", "glm", "glm4"),
    *("glm4_moe", "granite", "granitemoe", "helium", "hunyuan_v1_dense", "internlm2", "internlm3", "mimo"),
    *("minicpm", "mixtral", "nanochat", "olmo2", "olmoe", "phi", "phi3", "qwen2", "qwen2_moe", "qwen3"),
    *("qwen3_moe", "seed_oss", "solar_open", "starcoder2", "talkie", "telechat3"),
)

# What the others need beside, or in place of, what is common.
_OWN: dict[str, dict[str, Any]] = {
    "afm7": {"hidden_dim": 64, "num_layers": 4, "num_kv_reuse_layers": 2, "num_heads": 4, "num_kv_heads": 2},
    "afmoe": {"layer_types": _SLIDING_THEN_FULL, "num_dense_layers": 1},
    "apertus": {"post_norm": False, "qk_norm": True},
    "baichuan_m1": {"sliding_window_layers": [0], "conv_window": 2},
    "bailing_hybrid": {"layer_group_size": 2, "group_norm_size": 2},
    "bailing_moe_linear": {"layer_group_size": 2, "group_norm_size": 2},
    "bailing_moe_v3": {"layer_group_size": 2, "moe_shared_expert_intermediate_size": 32, "head_dim": 32},
    "cohere2": {"sliding_window_pattern": 2},
    "dbrx": {
        "d_model": 64,
        "n_heads": 4,
        "n_layers": 2,
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0},
        "ffn_config": {"ffn_hidden_size": 96, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "deepseek_v2": {
        **_MLA_MOE,
        "topk_method": "greedy",
        "rope_scaling": {
            "type": "yarn",
            "factor": 4.0,
            "mscale": 1.0,
            "mscale_all_dim": 0.7,
            "original_max_position_embeddings": 512,
        },
    },
    "deepseek_v3": _MLA_MOE,
    "deepseek_v32": _MLA_MOE,
    # Layers: window only; one that compresses every 4 tokens, indexes them and picks the candidates; one that reads
    # what the one before it picked; one that compresses and indexes anew, every single token; one that only indexes.
    "deepseek_v41": {
        "num_hidden_layers": 5,
        "head_dim": 32,
        "index_head_dim": 32,
        "o_groups": 2,
        "o_lora_rank": 16,
        "compress_ratios": (0, 4, 4, 1, 1),
        "kv_source_layer_ids": (1, 3),
        "index_source_layer_ids": (1, 3, 4),
        "candidate_source_layer_id": 3,
        "candidate_topk_blocks": 4,
        "index_topk": 16,
        "sliding_window": 32,
        "rms_norm_eps": 1e-6,
        "hc_mult": 2,
    },
    "ernie4_5_moe": {"moe_num_experts": 4, "moe_layer_start_index": 1, "moe_k": 2, "moe_num_shared_experts": 1},
    "exaone": {"num_layers": 2},
    "exaone4": {"sliding_window_pattern": "LG"},
    "exaone_moe": {"layer_types": _SLIDING_THEN_FULL, "is_moe_layer": [False, True]},
    "falcon_h1": {
        "mamba_chunk_size": 32,
        "mamba_d_head": 16,
        "mamba_d_ssm": 64,
        "mamba_n_heads": 4,
        "mamba_rms_norm": True,
    },
    "gear": {"num_hidden_layers": 3, "layer_types": ["conv_mixer", *_SLIDING_THEN_FULL]},
    "gemma2": {"query_pre_attn_scalar": 16.0},
    "gemma3": {"text_config": {**_COMMON, **_GEMMA3, "model_type": "gemma3_text"}},
    "gemma3_text": _GEMMA3,
    "gemma3n": {"text_config": {**_COMMON, **_GEMMA3N, "model_type": "gemma3n_text"}},
    "gemma4": {"text_config": {**_COMMON, **_GEMMA4}},
    "gemma4_text": _GEMMA4,
    "glm4_moe_lite": _MLA_MOE,
    "glm_moe_dsa": {**_MLA_MOE, "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"}},
    "gpt2": {"n_ctx": 1024, "n_embd": 64, "n_head": 4, "n_layer": 2, "n_positions": 1024, "num_key_value_heads": 4},
    "gpt_bigcode": {
        "n_embd": 64,
        "n_layer": 2,
        "n_inner": 96,
        "n_head": 4,
        "n_positions": 1024,
        "num_key_value_heads": 1,
    },
    "gpt_neox": {"rotary_emb_base": 10000, "rotary_pct": 0.5},
    "gpt_oss": {"layer_types": _SLIDING_THEN_FULL},
    "gptj": {"n_embd": 64, "n_positions": 1024, "n_head": 4, "rotary_dim": 8, "n_layer": 2},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"], "mamba_n_heads": 4, "mamba_d_head": 16},
    "hunyuan": {
        "num_hidden_layers": 4,
        "moe_topk": 2,
        "num_shared_expert": 1,
        "use_mixed_mlp_moe": True,
        "use_cla": True,
        "cla_share_factor": 2,
        "rope_scaling": {"type": "dynamic", "alpha": 1000.0, "factor": 1.0},
    },
    "iquestloopcoder": {"loop_window_size": WINDOW},
    "jamba": {
        "num_hidden_layers": 4,
        "attn_layer_offset": 1,
        "attn_layer_period": 2,
        "expert_layer_offset": 2,
        "expert_layer_period": 4,
    },
    "kimi_k25": {"text_config": {**_COMMON, **_MLA_MOE}},
    "kimi_k3": {"text_config": {**_COMMON, **_KIMI_LINEAR, "attn_res_block_size": 1}},
    "kimi_linear": {**_KIMI_LINEAR, "model_max_length": 2048},
    "kimi_vl": {"text_config": {**_COMMON, **_MLA_MOE}},
    "laguna": {
        "layer_types": _SLIDING_THEN_FULL,
        "num_attention_heads_per_layer": [2, 4],
        "rope_parameters": _TWO_ROPES,
    },
    "lfm2": _LFM2,
    "lfm2-vl": {"text_config": {**_COMMON, **_LFM2, "model_type": "lfm2"}},
    "lfm2_moe": _LFM2,
    "lille-130m": {"block_size": 1024, "n_embd": 64, "n_head": 4, "n_kv_heads": 2, "n_layer": 2},
    "llama": {"layer_types": _SLIDING_THEN_FULL},
    "llama4": {"text_config": {**_COMMON, **_LLAMA4}},
    "llama4_text": {"intermediate_size_mlp": 96, "no_rope_layers": [1, 0]},
    "longcat_flash": _LONGCAT,
    "longcat_flash_ngram": {**_LONGCAT, "ngram_vocab_size_ratio": 3, "emb_neighbor_num": 3, "emb_split_num": 2},
    "mamba": {"intermediate_size": 128, "time_step_rank": 4, "use_bcdt_rms": True},
    "mamba2": {"num_heads": 8, "head_dim": 16, "intermediate_size": 128, "time_step_rank": "auto"},
    "mellum": {"layer_types": _SLIDING_THEN_FULL, "rope_parameters": _TWO_ROPES},
    "mimo_v2_flash": {
        **_MLA_MOE,
        "hybrid_layer_pattern": [1, 0],
        "moe_layer_freq": [0, 1],
        "add_swa_attention_sink_bias": True,
        "add_full_attention_sink_bias": False,
        "sliding_window_size": WINDOW,
        "layernorm_epsilon": 1e-5,
        "num_key_value_heads": 2,
        "swa_rope_theta": 1000.0,
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 4,
        "swa_head_dim": 16,
        "swa_v_head_dim": 8,
        "v_head_dim": 8,
    },
    "minicpm3": {
        "rope_scaling": {
            "type": "longrope",
            "original_max_position_embeddings": 1024,
            "short_factor": [1.0] * 4,
            "long_factor": [1.0] * 4,
        }
    },
    "minimax": {"rotary_dim": 8},
    "minimax_m3_vl": {
        "text_config": {
            **_COMMON,
            "dense_intermediate_size": 96,
            "moe_layer_freq": [0, 1],
            "sparse_attention_config": {
                "sparse_num_index_heads": 2,
                "sparse_index_dim": 16,
                "sparse_block_size": 16,
                "sparse_topk_blocks": 2,
                "sparse_local_block": 1,
                "sparse_attention_freq": [0, 1],
            },
        }
    },
    "ministral3": _MINISTRAL3,
    # Its window is a mask over a plain cache, and begins behind the tokens that Torpor tries a network with.
    "mistral3": {"text_config": {**_COMMON, **_MINISTRAL3, "model_type": "ministral3", "sliding_window": 100}},
    "mistral4": {**_MLA_MOE, "rope_interleave": True, "rope_parameters": _LLAMA4_SCALED_ROPE},
    "muse_glimmer": {"layer_types": _SLIDING_THEN_FULL},
    "muse_spark": {
        "text_config": {
            **_COMMON,
            "post_norm_eps": 1e-6,
            "rope_parameters": {"rope_theta": 10000.0},
            "layer_rope_theta": [10000.0, 0.0],
            "layer_types": _SLIDING_THEN_FULL,
            "final_logit_softcapping": 20.0,
            "output_multiplier": 1.0,
            "moe_hidden_size": 32,
            "num_shared_experts": 0,
        }
    },
    "nanbeige": {"num_loops": 2},
    "nemotron": {"hidden_act": "relu2"},
    # One layer without attention, one whose attention is a linear map, and one with both halves.
    "nemotron-nas": {
        "num_hidden_layers": 3,
        "block_configs": [
            {"attention": {"no_op": True}, "ffn": {"ffn_mult": 1.0}},
            {"attention": {"n_heads_in_group": 2}, "ffn": {"ffn_mult": 1.0}},
            {"attention": {"replace_with_linear": True}, "ffn": {"no_op": True}},
        ],
    },
    "nemotron_h": {
        "hybrid_override_pattern": ["M", "*", "-", "E"],
        "mamba_num_heads": 4,
        "mamba_head_dim": 16,
        "moe_shared_expert_intermediate_size": 32,
    },
    "olmo": {"d_model": 64, "n_layers": 2, "mlp_hidden_size": 96, "n_heads": 4, "embedding_size": VOCABULARY},
    "olmo3": {"layer_types": _SLIDING_THEN_FULL},
    "olmo_hybrid": {"layer_types": ["linear_attention", "full_attention"]},
    "openelm": {
        "num_transformer_layers": 2,
        "model_dim": 64,
        "ffn_dim_divisor": 16,
        "num_query_heads": [2, 4],
        "num_kv_heads": [1, 2],
        "ffn_multipliers": [1.0, 2.0],
    },
    "phi3small": {
        "dense_attention_every_n_layers": 2,
        "ff_intermediate_size": 96,
        "gegelu_limit": 20.0,
        "blocksparse_num_local_blocks": 2,
        "blocksparse_vert_stride": 2,
        # It writes to the logits of reserved ids without looking how many logits there are.
        "vocab_size": 100_352,
    },
    "phimoe": {
        "rope_scaling": {
            "type": "longrope",
            "long_factor": [1.0] * 8,
            "short_factor": [1.0] * 8,
            "long_mscale": 1.2,
            "short_mscale": 1.1,
        }
    },
    "phixtral": {"num_vocab": VOCABULARY, "model_dim": 64, "num_heads": 4, "num_layers": 2, "rotary_dim": 8},
    "pixtral": {"text_config": {**_COMMON, "model_type": "mistral"}},
    "plamo": {"n_shared_head": 2},
    "plamo2": {
        "hidden_size_per_head": 16,
        "mamba_num_heads": 4,
        "mamba_chunk_size": 32,
        "mamba_step": 2,
        "full_attention_idx": [1],
    },
    "plamo3": {"sliding_window_pattern": 2},
    "prism_hadamard_qwen35": {
        "text_config": {**_COMMON, **_QWEN35, "hidden_size": 128, "intermediate_size": 512},
        "schema_version": 1,
        "tensor_namespace": "mlx-lm-text",
        "quantization": {"bits": 2, "group_size": 128, "mode": "affine"},
        "modules": [
            {"path": "model.embed_tokens", "embedding": True, "dtype": "float16", "block": 0},
            {"path": "model.layers.1.mlp.down_proj", "embedding": False, "dtype": "float16", "block": 512},
        ],
    },
    "qwen": {"kv_channels": 16},
    "qwen2_vl": {"text_config": {**_COMMON, "model_type": "qwen2"}},
    "qwen3_5": {"text_config": {**_COMMON, **_QWEN35}},
    "qwen3_5_moe": {"text_config": {**_COMMON, **_QWEN35_MOE}},
    "qwen3_next": {"full_attention_interval": 2},
    "qwen3_vl": {"text_config": {**_COMMON, "model_type": "qwen3"}},
    "qwen3_vl_moe": {"text_config": {**_COMMON, "model_type": "qwen3_moe"}},
    "recurrent_gemma": {
        "conv1d_width": 4,
        "logits_soft_cap": 30.0,
        "attention_window_size": WINDOW,
        "num_key_value_heads": 1,
        "block_types": ["recurrent", "attention"],
    },
    "rwkv7": {
        "head_dim": 32,
        "a_low_rank_dim": 8,
        "v_low_rank_dim": 8,
        "gate_low_rank_dim": 8,
        "decay_low_rank_dim": 8,
    },
    "smollm3": {"no_rope_layers": [1, 0]},
    "spark2_5": {"layer_types": _SLIDING_THEN_FULL, "rope_parameters": _TWO_ROPES},
    "stablelm": {"use_qkv_bias": True, "qk_layernorm": True},
    "step3p5": {
        "num_attention_groups": 2,
        "layer_types": _SLIDING_THEN_FULL,
        "attention_other_setting": {"num_attention_heads": 2, "num_attention_groups": 1},
        "moe_num_experts": 4,
        "moe_top_k": 2,
        "share_expert_dim": 32,
    },
    "youtu_llm": {"num_key_value_heads": 4},
}


@dataclass(frozen=True, slots=True)
class Case:
    """A row of the matrix: an architecture with a small configuration, and the caches that it is given.

    caches: makes the empty caches of a network; the network's own where nothing else is said.
    chunk_tokens: how many tokens it is given at once, as the daemon does on a CPU, or as few as it bears.
    """

    name: str
    module: str
    config: dict[str, Any]
    caches: Callable[[Any], list[Any]] = make_prompt_cache
    chunk_tokens: int = 256

    def build(self, dtype: str) -> Any:
        """The network as mlx-lm loads it, with seeded random weights, in the dtype; the same in every process.

        In another dtype than float32 its experts are quantized, as those of most published mixtures are.

        Raises:
            whatever mlx-lm raises.
        """
        # mlx_lm.models.olmo looks for this package, ends the process where there is none, and uses nothing of it.
        sys.modules.setdefault("hf_olmo", ModuleType("hf_olmo"))
        module = importlib.import_module(f"mlx_lm.models.{self.module}")
        mx.random.seed(SEED)
        network = module.Model(module.ModelArgs.from_dict(_copied(self.config)))
        _disturb(network)
        if dtype != "float32":
            nn.quantize(network, **_EXPERT_BITS, class_predicate=lambda _, part: isinstance(part, SwitchLinear))
        # What an architecture keeps in float32 whatever the checkpoint's type is, it names itself.
        may_cast = getattr(network, "cast_predicate", lambda _: True)
        cast = {
            name: value.astype(DTYPES[dtype])
            for name, value in tree_flatten(network.parameters())
            if mx.issubdtype(value.dtype, mx.floating) and may_cast(name)
        }
        network.update(tree_unflatten(list(cast.items())))
        mx.eval(network.parameters())
        return network.eval()


def architectures() -> list[str]:
    """The modules of the installed mlx-lm's model folder that offer a `Model`, found without importing them."""
    return sorted(path.stem for path in MODELS_FOLDER.glob("*.py") if "Model" in _top_level_names(path))


def cases() -> list[Case]:
    """Every row: one for each architecture, then those with caches that a caller may ask for instead."""
    rows = [
        Case(name, name, {**_COMMON, "model_type": name, **own}, chunk_tokens=_CHUNKS.get(name, 256))
        for name, own in sorted((_OWN | {name: {} for name in _AS_COMMON}).items())
    ]
    of = {row.name: row for row in rows}
    rows.append(_variant(of["qwen3"], "all layers rotating, 4 kept", _rotating_with_sinks))
    rows.append(_variant(of["qwen3"], "ConcatenateKVCache", _concatenating))
    rows.append(_variant(of["qwen3"], "8 bits, groups of 64", _quantized(64, 8), head_dim=64))
    rows += [
        _variant(of["qwen3"], f"{bits} bits, groups of 32", _quantized(32, bits), head_dim=32) for bits in (8, 4, 3)
    ]
    rows.append(_variant(of["gemma"], "8 bits, groups of 32", _quantized(32, 8), head_dim=32))
    rows.append(_variant(of["qwen3_next"], "8 bits, groups of 32", _quantized(32, 8), head_dim=32))
    return rows


def digest_of_weights(network: Any) -> str:
    """BLAKE3-256, as hex, of all parameters with their names, types and shapes."""
    hasher = blake3()
    for name, value in sorted(tree_flatten(network.parameters())):
        hasher.update(f"{name} {value.dtype} {value.shape}".encode())
        hasher.update(bits_of(value))
    return hasher.hexdigest()


def bits_of(value: mx.array) -> bytes:
    """The bytes of an array's elements in row-major order."""
    if not value.size:
        return b""
    raw = mx.contiguous(value.reshape(-1)).view(mx.uint8)
    mx.eval(raw)
    return bytes(memoryview(raw))


def _variant(base: Case, what: str, caches: Callable[[Any], list[Any]], **changes: Any) -> Case:
    return Case(f"{base.name}: {what}", base.module, {**base.config, **changes}, caches)


def _rotating_with_sinks(network: Any) -> list[Any]:
    made: list[Any] = make_prompt_cache(network, max_kv_size=WINDOW)
    return made


def _concatenating(network: Any) -> list[Any]:
    return [ConcatenateKVCache() for _ in make_prompt_cache(network)]


def _quantized(group_size: int, bits: int) -> Callable[[Any], list[Any]]:
    def make(network: Any) -> list[Any]:
        plain = make_prompt_cache(network)
        return [QuantizedKVCache(group_size, bits) if type(cache) is KVCache else cache for cache in plain]

    return make


def _top_level_names(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.ImportFrom):
            names.update(alias.asname or alias.name for alias in node.names)
    return names


def _copied(config: Any) -> Any:
    # Some ModelArgs write into the dictionaries that they are given.
    if isinstance(config, dict):
        return {key: _copied(value) for key, value in config.items()}
    return [_copied(value) for value in config] if isinstance(config, list) else config


def _disturb(network: Any) -> None:
    """Weights that make every part of a network count: beside what starts as one number all over, random ones (zeros
    would hide whole branches, equal gates the order of what they gate), and matrices large enough that what was read
    long ago decides what is said next."""

    def disturbed(name: str, value: mx.array) -> mx.array:
        if not value.size:
            return value
        if mx.issubdtype(value.dtype, mx.integer):
            return mx.random.randint(0, 1 << 7, value.shape).astype(value.dtype)
        if not mx.issubdtype(value.dtype, mx.floating):
            return value
        if mx.all(value == value.reshape(-1)[0]).item():
            return value + 0.1 * mx.random.normal(value.shape).astype(value.dtype)
        return value * (2 if value.ndim > 1 and not _TABLES.search(name) else 1)

    network.update(tree_map_with_path(disturbed, network.parameters()))
