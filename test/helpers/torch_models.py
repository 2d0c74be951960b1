"""Modules for the import from PyTorch: small ones of transformers, and convolutional networks written out."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

BATCH, SEQUENCE, VOCABULARY = 2, 5, 11


class InDouble(TorchFunctionMode):
    """Models that compute parts of themselves in float32 do so in float64, so that little is lost to rounding."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.float:
            func = torch.Tensor.double

        def double(x: Any) -> Any:
            return torch.float64 if x is torch.float32 else x

        return func(*tree_map(double, args), **tree_map(double, kwargs or {}))


class GroupedInDouble(InDouble):
    """For runs in PyTorch, whose grouped matrix product does not take float64."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.__name__ != "_grouped_mm":
            return super().__torch_function__(func, types, args, kwargs)
        x, weights = args
        ends = [0, *(kwargs or {})["offs"].tolist()]
        return torch.cat([x[a:b] @ w for a, b, w in zip(ends, ends[1:], weights, strict=False)])


def ids(below: int = VOCABULARY, batch: int = BATCH) -> torch.Tensor:
    return torch.randint(1, below, (batch, SEQUENCE))


def mlp() -> tuple[nn.Module, Any, Any]:
    module = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16, bias=False), nn.GELU(), nn.Linear(16, 4))
    return module, (torch.randn(6, 8), torch.randint(0, 4, (6,))), nn.CrossEntropyLoss()


def gpt2(attention: str) -> tuple[nn.Module, Any, None]:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        **{"vocab_size": VOCABULARY, "n_positions": 8, "n_embd": 8, "n_layer": 2, "n_head": 2, "use_cache": False},
        **{"resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0, "bos_token_id": 1, "eos_token_id": 1},
        attn_implementation=attention,
    )
    tokens = ids()
    return GPT2LMHeadModel(config), {"input_ids": tokens, "labels": tokens}, None


def llama(attention: str) -> tuple[nn.Module, Any, None]:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        **{"vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 12, "num_hidden_layers": 2},
        **{"num_attention_heads": 4, "num_key_value_heads": 2, "use_cache": False},
        attn_implementation=attention,
    )
    return LlamaForCausalLM(config), {"input_ids": ids(), "labels": ids()}, None


def bert_config(attention: str) -> Any:
    from transformers import BertConfig

    return BertConfig(
        **{"vocab_size": VOCABULARY, "hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2},
        **{"intermediate_size": 12, "max_position_embeddings": 8},
        **{"hidden_dropout_prob": 0, "attention_probs_dropout_prob": 0, "attn_implementation": attention},
    )


def bert_pretraining(attention: str) -> tuple[nn.Module, Any, None]:
    from transformers import BertForPreTraining

    inputs = {"input_ids": ids(), "token_type_ids": ids(2) - 1, "labels": ids()}
    return (
        BertForPreTraining(bert_config(attention)),
        inputs | {"next_sentence_label": torch.randint(0, 2, (BATCH,))},
        None,
    )


def bert_masked(attention: str) -> tuple[nn.Module, Any, None]:
    """With padding, which the mask hides and whose embedding gets no gradient, and labels for some tokens only."""
    from transformers import BertForMaskedLM

    tokens, mask = ids(), torch.ones(BATCH, SEQUENCE, dtype=torch.int64)
    tokens[0, 3:] = mask[0, 3:] = 0
    labels = torch.where(torch.rand(tokens.shape) < 0.5, tokens, -100)
    return (
        BertForMaskedLM(bert_config(attention)),
        {"input_ids": tokens, "attention_mask": mask, "labels": labels},
        None,
    )


def mixtral(batch: int = BATCH) -> tuple[nn.Module, Any, None]:
    """A mixture of which each token goes to two experts."""
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        **{"vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 12, "num_hidden_layers": 2},
        **{"num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2},
        use_cache=False,
    )
    return MixtralForCausalLM(config), {"input_ids": ids(batch=batch), "labels": ids(batch=batch)}, None


def gemma2(attention: str = "eager") -> tuple[nn.Module, Any, None]:
    """Scores kept small by a tanh, in a layer with a sliding window and one without."""
    from transformers import Gemma2Config, Gemma2ForCausalLM

    config = Gemma2Config(
        **{"vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 12, "num_hidden_layers": 2},
        **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4, "use_cache": False},
        **{"sliding_window": 3, "attn_logit_softcapping": 0.5, "query_pre_attn_scalar": 4},
        attn_implementation=attention,
    )
    return Gemma2ForCausalLM(config), {"input_ids": ids(), "labels": ids()}, None


def deepseek_v2(batch: int = BATCH) -> tuple[nn.Module, Any, None]:
    """Latent attention with complex rotary positions, and a mixture by groups with a shared expert."""
    from transformers import DeepseekV2Config, DeepseekV2ForCausalLM

    config = DeepseekV2Config(
        **{"vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2},
        **{"num_attention_heads": 4, "num_key_value_heads": 4, "kv_lora_rank": 8, "q_lora_rank": 8},
        **{"qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 4, "use_cache": False},
        **{"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1, "moe_intermediate_size": 12},
        **{"n_group": 2, "topk_group": 1, "topk_method": "group_limited_greedy", "first_k_dense_replace": 1},
    )
    return DeepseekV2ForCausalLM(config), {"input_ids": ids(batch=batch), "labels": ids(batch=batch)}, None


def llama4(batch: int = BATCH) -> tuple[nn.Module, Any, None]:
    """Complex rotary positions in chunks of attention, a layer without, and a mixture with scores by sigmoids."""
    from transformers import Llama4ForCausalLM, Llama4TextConfig

    config = Llama4TextConfig(
        **{"vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 12, "intermediate_size_mlp": 24},
        **{"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4},
        **{"num_local_experts": 4, "num_experts_per_tok": 2, "interleave_moe_layer_step": 2, "use_cache": False},
        **{"attention_chunk_size": 4, "no_rope_layers": [1, 0], "floor_scale": 2, "pad_token_id": 0},
    )
    return Llama4ForCausalLM(config), {"input_ids": ids(batch=batch), "labels": ids(batch=batch)}, None


TRANSFORMERS = {
    f"{build.__name__}_{attention}": (build, attention)
    for build in (gpt2, llama, bert_pretraining, bert_masked)
    for attention in ("sdpa", "eager")
}
