"""Small models of transformers with random weights, for `bench/imports.py`: each by name, as (module, inputs)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import transformers

BATCH, SEQUENCE, VOCABULARY, IMAGE = 2, 6, 13, 32

NO_DROPOUT = (
    *("hidden_dropout_prob", "attention_probs_dropout_prob", "attention_dropout", "hidden_dropout", "dropout"),
    *("resid_pdrop", "embd_pdrop", "attn_pdrop", "activation_dropout", "dropout_rate", "classifier_dropout"),
    *("dropout_prob", "drop_path_rate", "classifier_dropout_prob", "embedding_dropout", "layerdrop"),
)
"""Rates of dropout, by all the names that configurations give them."""

WIDE = {"vocab_size": VOCABULARY, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4}
DECODER = {**WIDE, "intermediate_size": 24, "num_key_value_heads": 2, "max_position_embeddings": 16, "head_dim": 4}
ENCODER = {**WIDE, "intermediate_size": 24, "max_position_embeddings": 16}
TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
PICTURES = {"image_size": IMAGE, "patch_size": 8, "num_labels": 3}
EXPERTS = {"num_experts_per_tok": 2, "output_router_logits": True}

LATENT = {
    **WIDE,
    "intermediate_size": 24,
    "moe_intermediate_size": 12,
    "num_key_value_heads": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 8,
    "q_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4,
    "v_head_dim": 4,
    "n_shared_experts": 1,
    "max_position_embeddings": 16,
}
"""Latent attention, and a mixture in groups with a shared expert, as in DeepSeek's models."""


def ids(low: int = 3) -> torch.Tensor:
    return torch.randint(low, VOCABULARY, (BATCH, SEQUENCE))


def words() -> dict[str, torch.Tensor]:
    """Tokens and labels of a language model."""
    return {"input_ids": ids(), "labels": ids()}


def padded() -> dict[str, torch.Tensor]:
    """Tokens with padding, the mask that hides it, and labels that count for some positions only."""
    tokens, mask = ids(), torch.ones(BATCH, SEQUENCE, dtype=torch.int64)
    tokens[0, 4:] = mask[0, 4:] = 0
    return {
        "input_ids": tokens,
        "attention_mask": mask,
        "labels": torch.where(torch.rand(tokens.shape) < 0.5, tokens, -100),
    }


def sentences() -> dict[str, torch.Tensor]:
    """Tokens, and a class for each sequence."""
    return {"input_ids": ids(), "labels": torch.randint(0, 2, (BATCH,))}


def pictures(size: int = IMAGE) -> dict[str, torch.Tensor]:
    return {"pixel_values": torch.randn(BATCH, 3, size, size), "labels": torch.randint(0, 3, (BATCH,))}


def large_pictures() -> dict[str, torch.Tensor]:
    """Pictures of which batch norms after five halvings still have several places for their statistics."""
    return pictures(3 * IMAGE)


def sounds() -> dict[str, torch.Tensor]:
    return {"input_features": torch.randn(BATCH, 8, 20), "labels": ids()}


def captions() -> dict[str, Any]:
    tokens = ids()
    tokens[:, -1] = 2
    images = torch.randn(BATCH, 3, IMAGE, IMAGE)
    return {"input_ids": tokens, "pixel_values": images, "return_loss": True}


def _clip() -> tuple[Any, dict[str, Any]]:
    text = {**ENCODER, **TOKENS}
    vision = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.CLIPConfig(
        text_config=text, vision_config={**vision, "image_size": IMAGE, "patch_size": 8}, projection_dim=8
    )
    return transformers.CLIPModel(config), captions()


RECIPES: Mapping[str, tuple[str, str, Mapping[str, Any], Callable[[], dict[str, Any]]]] = {
    "gpt2": ("GPT2", "LMHeadModel", {"n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 16}, words),
    "gptj": ("GPTJ", "ForCausalLM", {"n_embd": 16, "n_layer": 2, "n_head": 4, "rotary_dim": 4}, words),
    "gpt_neo": (
        "GPTNeo",
        "ForCausalLM",
        {
            "hidden_size": 16,
            "num_layers": 2,
            "num_heads": 4,
            "attention_types": [[["global", "local"], 1]],
            "window_size": 4,
            "max_position_embeddings": 16,
        },
        words,
    ),
    "gpt_neox": ("GPTNeoX", "ForCausalLM", ENCODER, words),
    "bloom": ("Bloom", "ForCausalLM", {"hidden_size": 16, "n_layer": 2, "n_head": 4}, words),
    "opt": (
        "OPT",
        "ForCausalLM",
        {**WIDE, "ffn_dim": 24, "word_embed_proj_dim": 16, "max_position_embeddings": 16, **TOKENS},
        words,
    ),
    "falcon": ("Falcon", "ForCausalLM", {**WIDE, "num_kv_heads": 1}, words),
    "llama": ("Llama", "ForCausalLM", DECODER, words),
    "llama_padded": ("Llama", "ForCausalLM", DECODER, padded),
    "llama4": (
        "Llama4",
        "ForCausalLM",
        {
            **DECODER,
            "intermediate_size_mlp": 24,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "interleave_moe_layer_step": 2,
            "attention_chunk_size": 4,
            "no_rope_layers": [1, 0],
            "floor_scale": 2,
            "pad_token_id": 0,
        },
        words,
    ),
    "mistral": ("Mistral", "ForCausalLM", {**DECODER, "sliding_window": 4}, words),
    "phi3": ("Phi3", "ForCausalLM", {**DECODER, **TOKENS}, words),
    "qwen2": ("Qwen2", "ForCausalLM", DECODER, words),
    "qwen3": ("Qwen3", "ForCausalLM", DECODER, words),
    "gemma": ("Gemma", "ForCausalLM", DECODER, words),
    "gemma2": ("Gemma2", "ForCausalLM", DECODER, words),
    "mixtral": ("Mixtral", "ForCausalLM", {**DECODER, **EXPERTS, "num_local_experts": 4}, words),
    "mixtral_eager": ("Mixtral", "ForCausalLM", {**DECODER, **EXPERTS, "num_local_experts": 4}, words),
    "qwen3_moe": (
        "Qwen3Moe",
        "ForCausalLM",
        {
            **DECODER,
            **EXPERTS,
            "num_experts": 4,
            "moe_intermediate_size": 12,
            "mlp_only_layers": [0],
        },
        words,
    ),
    "olmoe": ("Olmoe", "ForCausalLM", {**DECODER, **EXPERTS, "num_experts": 4, "pad_token_id": 0}, words),
    "deepseek_v2": ("DeepseekV2", "ForCausalLM", {**LATENT, "topk_method": "group_limited_greedy"}, words),
    "deepseek_v3": ("DeepseekV3", "ForCausalLM", LATENT, words),
    "mamba": (
        "Mamba",
        "ForCausalLM",
        {"vocab_size": VOCABULARY, "hidden_size": 8, "num_hidden_layers": 2, "state_size": 4, "time_step_rank": 2},
        words,
    ),
    "bert": ("Bert", "ForMaskedLM", ENCODER, padded),
    "roberta": ("Roberta", "ForMaskedLM", {**ENCODER, "pad_token_id": 0}, padded),
    "distilbert": (
        "DistilBert",
        "ForSequenceClassification",
        {
            "dim": 16,
            "n_layers": 2,
            "n_heads": 4,
            "hidden_dim": 24,
            "max_position_embeddings": 16,
        },
        sentences,
    ),
    "albert": ("Albert", "ForMaskedLM", {**ENCODER, "embedding_size": 8}, padded),
    "electra": ("Electra", "ForSequenceClassification", {**ENCODER, "embedding_size": 8}, sentences),
    "deberta_v2": (
        "DebertaV2",
        "ForMaskedLM",
        {
            **ENCODER,
            "relative_attention": True,
            "position_buckets": 4,
            "pos_att_type": ["p2c", "c2p"],
            "pooler_hidden_size": 16,
        },
        padded,
    ),
    "xlnet": ("XLNet", "LMHeadModel", {"d_model": 16, "n_layer": 2, "n_head": 4, "d_inner": 24}, words),
    "t5": (
        "T5",
        "ForConditionalGeneration",
        {
            "d_model": 16,
            "d_kv": 4,
            "d_ff": 24,
            "num_layers": 2,
            "num_heads": 4,
            "decoder_start_token_id": 0,
        },
        words,
    ),
    "bart": (
        "Bart",
        "ForConditionalGeneration",
        {
            "d_model": 16,
            "encoder_layers": 2,
            "decoder_layers": 2,
            "encoder_attention_heads": 4,
            "decoder_attention_heads": 4,
            "encoder_ffn_dim": 24,
            "decoder_ffn_dim": 24,
            "max_position_embeddings": 16,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "decoder_start_token_id": 2,
            "forced_eos_token_id": 2,
        },
        words,
    ),
    "whisper": (
        "Whisper",
        "ForConditionalGeneration",
        {
            "d_model": 16,
            "encoder_layers": 2,
            "decoder_layers": 2,
            "encoder_attention_heads": 4,
            "decoder_attention_heads": 4,
            "encoder_ffn_dim": 24,
            "decoder_ffn_dim": 24,
            "num_mel_bins": 8,
            "max_source_positions": 10,
            "max_target_positions": 16,
            "decoder_start_token_id": 1,
            **TOKENS,
        },
        sounds,
    ),
    "vit": ("ViT", "ForImageClassification", {**ENCODER, **PICTURES}, pictures),
    "deit": ("DeiT", "ForImageClassification", {**ENCODER, **PICTURES}, pictures),
    "dinov2": ("Dinov2", "ForImageClassification", {**ENCODER, **PICTURES}, pictures),
    "swin": (
        "Swin",
        "ForImageClassification",
        {
            "image_size": IMAGE,
            "patch_size": 4,
            "embed_dim": 8,
            "depths": [2, 1],
            "num_heads": [2, 4],
            "window_size": 4,
            "num_labels": 3,
        },
        pictures,
    ),
    "convnext": (
        "ConvNext",
        "ForImageClassification",
        {
            "hidden_sizes": [8, 16],
            "depths": [1, 1],
            "num_stages": 2,
            "num_labels": 3,
        },
        pictures,
    ),
    "segformer": (
        "Segformer",
        "ForImageClassification",
        {
            "hidden_sizes": [8, 16],
            "depths": [1, 1],
            "num_encoder_blocks": 2,
            "num_attention_heads": [1, 2],
            "sr_ratios": [2, 1],
            "patch_sizes": [7, 3],
            "strides": [4, 2],
            "mlp_ratios": [2, 2],
            "decoder_hidden_size": 16,
            "num_labels": 3,
        },
        pictures,
    ),
    "resnet": (
        "ResNet",
        "ForImageClassification",
        {
            "embedding_size": 8,
            "hidden_sizes": [8, 16],
            "depths": [1, 1],
            "num_labels": 3,
        },
        pictures,
    ),
    "mobilenet_v2": (
        "MobileNetV2",
        "ForImageClassification",
        {
            "image_size": IMAGE,
            "depth_multiplier": 0.25,
            "num_labels": 3,
            "classifier_dropout_prob": 0.0,
        },
        large_pictures,
    ),
    "efficientnet": (
        "EfficientNet",
        "ForImageClassification",
        {
            "image_size": IMAGE,
            "width_coefficient": 0.25,
            "depth_coefficient": 0.2,
            "hidden_dim": 320,
            "num_labels": 3,
        },
        pictures,
    ),
}
"""Name of the configuration, ending of the model's class, keys, and inputs."""
CONFIGURATIONS = {"llama4": "Llama4TextConfig"}
"""Names of configurations that are not called as their models."""


def build(name: str) -> tuple[torch.nn.Module, dict[str, Any]]:
    """Return (module, inputs by name) of a model of `RECIPES`, or of `clip`; without dropout."""
    if name == "clip":
        return _clip()
    prefix, ending, keys, inputs = RECIPES[name]
    config = getattr(transformers, CONFIGURATIONS.get(name, f"{prefix}Config"))(**{"vocab_size": VOCABULARY, **keys})
    for key in NO_DROPOUT:
        if getattr(config, key, None):
            setattr(config, key, 0.0)
    config.use_cache = False
    if name == "mixtral_eager":
        config._experts_implementation = "eager"
    return getattr(transformers, f"{prefix}{ending}")(config), inputs()


MODELS: Mapping[str, Callable[[], tuple[Any, ...]]] = {
    name: (lambda name=name: build(name)) for name in (*RECIPES, "clip")
}
