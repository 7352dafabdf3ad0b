"""Records the operators' calls of a real model for the conformance suite: `python -m hal.bench.capture`."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from hal.conformance.capture import Recorder, write
from hal.port.loading import load
from hal.port.transformers import apply

PROMPT = "The capital of France is"
NEW_TOKENS = 4
SAMPLING = {"temperature": 0.7, "top_k": 50, "top_p": 0.95, "min_p": None}


def record(path: Path) -> Recorder:
    """One short generation in bfloat16, and the loss and the draw that its logits lead to."""
    model, tokenizer = load(path, torch.bfloat16)
    inputs = tokenizer(PROMPT, return_tensors="pt")
    recorder = Recorder()
    with apply(model), torch.inference_mode():
        with recorder:
            ids = model.generate(**inputs, max_new_tokens=NEW_TOKENS, do_sample=False)
        logits = model(ids).logits[0]
    losses = {"ignore_index": -100, "label_smoothing": 0.0, "z_loss": 0.0, "reduction": "none"}
    recorder.add("cross_entropy", {"logits": logits[:-1], "target": ids[0, 1:], **losses})
    recorder.add("top_k_top_p_probs", {"logits": logits, **SAMPLING})
    recorder.add("top_k_top_p_sample", {"logits": logits, "seed": 1234, **SAMPLING})
    return recorder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True, help="GGUF file or Hugging Face directory")
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[1] / "conformance" / "data")
    arguments = parser.parse_args()
    write(record(arguments.model), arguments.out, arguments.model.stem)


if __name__ == "__main__":
    main()
