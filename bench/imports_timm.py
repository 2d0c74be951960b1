"""
Models of timm, small, for `imports.py`: vision transformers with plain and windowed attention, convolutional networks,
and mixtures of both. None is downloaded. Without timm there are none.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

try:
    import timm
except ImportError:
    timm = None

CLASSES = 5
TOKENS = {"img_size": 32, "embed_dim": 24, "depth": 2, "num_heads": 3}
"""Arguments that make a plain transformer over patches small."""
WINDOWS = {"img_size": 64, "embed_dim": 8, "depths": (2, 2), "num_heads": (2, 2)}

SIZES: Mapping[str, tuple[int, dict[str, Any]]] = {
    "vit_tiny_patch16_224": (32, TOKENS),
    "deit3_small_patch16_224": (32, TOKENS),
    "beit_base_patch16_224": (32, TOKENS),
    "eva02_tiny_patch14_224": (28, {**TOKENS, "img_size": 28}),
    "cait_xxs24_224": (32, TOKENS),
    "xcit_nano_12_p16_224": (32, TOKENS),
    "mixer_s32_224": (64, {"img_size": 64}),
    "gmlp_ti16_224": (32, {"img_size": 32}),
    "swin_tiny_patch4_window7_224": (64, {**WINDOWS, "window_size": 4}),
    "swinv2_tiny_window8_256": (64, {**WINDOWS, "window_size": 4}),
    "convnext_atto": (64, {}),
    "convnextv2_atto": (64, {}),
    "edgenext_xx_small": (64, {}),
    "resnet18": (32, {}),
    "efficientnet_b0": (96, {"drop_rate": 0.0}),
    "mobilenetv3_small_050": (96, {"drop_rate": 0.0}),
    "regnety_002": (32, {}),
    "ghostnet_050": (96, {"drop_rate": 0.0}),
    "mobilevit_xxs": (64, {}),
    "levit_128s": (224, {}),
    "poolformer_s12": (64, {}),
}
"""The size of images, and arguments that make the model small."""


def build(name: str) -> tuple[torch.nn.Module, tuple[torch.Tensor, torch.Tensor], Any]:
    """Return (module, (images, labels), loss) of a model of `SIZES`."""
    size, sizes = SIZES[name]
    module = timm.create_model(name, num_classes=CLASSES, **sizes)
    return module, (torch.randn(2, 3, size, size), torch.tensor([1, 3])), torch.nn.functional.cross_entropy


MODELS: Mapping[str, Callable[[], tuple[Any, ...]]] = (
    {} if timm is None else {name: (lambda name=name: build(name)) for name in SIZES}
)
