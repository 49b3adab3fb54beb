"""A vision tower with random weights in place of the quickstart's trained one: overrides can change its shape."""

from __future__ import annotations

import json

RANDOM_TOWER = {
    "model_type": "siglip_vision_model",
    "image_size": 112,
    "patch_size": 16,
    "hidden_size": 192,
    "intermediate_size": 768,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
}
"""49 tokens an image, as the quickstart's."""
RANDOM_TOWER_OVERRIDES = ("encoders.vision.path=null", f"encoders.vision.config={json.dumps(RANDOM_TOWER)}")
