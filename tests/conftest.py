"""What all tests share: the project root on the path, no network, one thread, a tiny tokenizer and model."""

import os
import sys
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["NO_PROXY"] = "127.0.0.1"
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import pytest
import torch

import sweet_rl

torch.set_num_threads(1)  # on models this small a second thread only waits


@pytest.fixture(scope="session")
def tokenizer():
    return sweet_rl.tiny_tokenizer()


@pytest.fixture
def model(tokenizer):
    """A fresh tiny model with random weights, large enough ones that its distributions are far from flat."""
    torch.manual_seed(0)
    model = sweet_rl.tiny_model(tokenizer).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(1.5)
    return model
